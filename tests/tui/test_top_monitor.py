"""What the screen reads: devices, processes and the host, again and again."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuprobe.cli import main
from gpuprobe.errors import DataError, UnsupportedSchema, UsageError
from gpuprobe.model.machine.devices import GpuProcess, NvLink
from gpuprobe.model.values import Reading, ReadStatus, Unavailable
from gpuprobe.probes.host import ProcTree, parse_stat
from gpuprobe.probes.monitor import HostWatch, Monitor
from gpuprobe.probes.nvml.live import RENEW, link_rate
from gpuprobe.recording.monitor_log import (
    WHOLE_EVERY,
    MomentLog,
    ReplayedLog,
    applied,
    changes,
    last_moment,
    read_moments,
)
from gpuprobe.testing import fleets
from gpuprobe.tui.monitor.processes import ListOptions, process_rows


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_reading_after_the_first_knows_what_a_full_one_knows() -> None:
    with Monitor("8xh100") as monitor:
        first, full, live = monitor.read(), monitor.read(), monitor.read()
    assert first.inventory.devices[0].clocks.sm.status is ReadStatus.NOT_COLLECTED
    for before, now in zip(full.inventory.devices, live.inventory.devices, strict=True):
        assert now == before
    assert [p.pid for p in live.inventory.processes] == [p.pid for p in full.inventory.processes]
    assert live.inventory.waterfalls == full.inventory.waterfalls


@pytest.mark.parametrize("fleet", sorted(fleets()))
def test_every_fleet_is_read_alike_by_both_kinds_of_reading(fleet: str) -> None:
    with Monitor(fleet) as monitor:
        monitor.read()
        full, live = monitor.read(), monitor.read()
    assert live.inventory.devices == full.inventory.devices
    # Fewer values are asked for, so fewer can be refused, but no device falls silent.
    assert {(e.device, e.status) for e in live.inventory.errors} == {
        (e.device, e.status) for e in full.inventory.errors
    }
    assert live.inventory.processes == full.inventory.processes


def test_load_moves_and_counters_become_rates() -> None:
    with Monitor("8xh100", moving=True) as monitor:
        seen = [monitor.read() for _ in range(30)]
    busy = {m.inventory.devices[0].utilisation.gpu.value for m in seen}
    assert len(busy) > 2
    rates = [m.links[0].tx.value for m in seen]
    assert isinstance(rates[0], Unavailable)  # a counter is no rate before its second reading
    assert all(isinstance(rate, float) and rate >= 0 for rate in rates[2:])
    idle = {m.inventory.devices[5].utilisation.gpu.value for m in seen}
    assert idle == {0}
    for moment in seen:
        for fall in moment.inventory.waterfalls:
            if not isinstance(fall.total, Unavailable):
                parts = [p for p in fall.parts.values() if not isinstance(p, Unavailable)]
                assert sum(parts) == fall.total


def test_everything_is_asked_again_now_and_then() -> None:
    with Monitor("8xh100") as monitor:
        monitor.read()
        monitor.read()
        assert monitor._fleet is not None
        monitor._fleet.devices[0]["persistence"] = 0
        kept = [monitor.read().inventory.devices[0].persistence.value for _ in range(RENEW)]
        fresh = monitor.read().inventory.devices[0].persistence.value
    assert set(kept) == {True}
    assert fresh is False


def test_a_gpu_is_lost_and_comes_back() -> None:
    with Monitor("8xh100") as monitor:
        monitor.read()
        monitor.read()
        assert monitor._fleet is not None
        device = monitor._fleet.devices[2]
        device["lost"] = True
        lost = [monitor.read() for _ in range(3)][-1]
        others = [d.name.status for i, d in enumerate(lost.inventory.devices) if i != 2]
        assert set(others) == {ReadStatus.OK}
        assert lost.inventory.devices[2].utilisation.gpu.status is ReadStatus.LOST
        assert {e.status for e in lost.inventory.errors} == {ReadStatus.LOST}
        device["lost"] = False
        back = monitor.read()
    assert back.inventory.devices[2].name.status is ReadStatus.OK
    assert not back.inventory.errors


def test_a_driver_goes_away_and_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    import pynvml

    with Monitor("8xh100") as monitor:
        monitor.read()
        monitor.read()
        library = pynvml.nvmlLib
        monkeypatch.setattr(library, "_open", 0)  # as after `rmmod nvidia`: uninitialised
        gone = monitor.read()
        assert not gone.inventory.sources[0].available
        assert gone.inventory.sources[0].reason
        assert not gone.inventory.devices
        back = [monitor.read() for _ in range(2)][-1]
    assert len(back.inventory.devices) == 8


def test_xids_are_told_by_device() -> None:
    with Monitor("ecc") as monitor:
        monitor.read()
        moment = monitor.read()
    assert not isinstance(moment.xids, Unavailable)
    assert {(x.code, x.count) for x in moment.xids} == {(48, 2), (63, 1)}
    assert {x.device for x in moment.xids} == {moment.inventory.devices[0].key}


# -- processes


def tree(folder: Path, pid: int, *, start: int = 50, busy: int = 0, parent: int = 1) -> None:
    home = folder / str(pid)
    home.mkdir(parents=True, exist_ok=True)
    numbers = ["0"] * 20
    numbers[0], numbers[10], numbers[18], numbers[20 - 1] = str(parent), str(busy), str(start), "0"
    (home / "stat").write_text(f"{pid} (a) b) R {' '.join(numbers)} 3\n")
    (home / "status").write_text("Name:\ta) b\nUid:\t0\t0\t0\t0\n")
    (home / "cmdline").write_bytes(f"train{start}\0".encode())
    (folder / "stat").write_text("cpu 10 0 10 80 0 0 0 0 0 0\nbtime 1000\n")


def test_processes_are_told_apart_by_their_start(tmp_path: Path) -> None:
    clock = Clock()
    watch = HostWatch(ProcTree(tmp_path), clock)
    tree(tmp_path, 7, parent=5)
    tree(tmp_path, 5)
    listed = (GpuProcess(7, "GPU-a", ("compute",)), GpuProcess(7, "GPU-b", ("compute",)))
    (one, two), loads = watch.processes(listed)
    assert (one.command.value, two.command.value) == ("train50", "train50")
    assert {load.pid: load.parent for load in loads} == {7: 5, 5: 1}
    assert {load.name for load in loads} == {"a) b"}
    clock.now += 2
    tree(tmp_path, 7, busy=os.sysconf("SC_CLK_TCK"), parent=5)
    (one, _), loads = watch.processes(listed)
    assert next(load.cpu.value for load in loads if load.pid == 7) == 50.0
    clock.now += 1
    tree(tmp_path, 7, start=99)  # the number was given to another process
    (one, _), loads = watch.processes(listed)
    assert one.command.value == "train99"
    assert isinstance(loads[0].cpu.value, Unavailable)


def test_a_process_that_ended_says_so_and_is_forgotten(tmp_path: Path) -> None:
    watch = HostWatch(ProcTree(tmp_path), Clock())
    tree(tmp_path, 7)
    listed = (GpuProcess(7, "GPU-a", ("compute",)),)
    watch.processes(listed)
    assert watch._known
    for path in (tmp_path / "7").iterdir():
        path.unlink()
    (gone,), loads = watch.processes(listed)
    assert isinstance(gone.command.value, Unavailable)
    assert not loads
    assert not watch._known


def test_the_hosts_load(tmp_path: Path) -> None:
    watch = HostWatch(ProcTree(tmp_path), Clock())
    tree(tmp_path, 7)
    first = watch.load()
    assert isinstance(first.cpu.value, Unavailable)
    assert isinstance(first.load.value, Unavailable)
    (tmp_path / "stat").write_text("cpu 20 0 20 100 0 0 0 0 0 0\n")
    (tmp_path / "loadavg").write_text("1.5 0.5 0.25 1/2 3\n")
    second = watch.load()
    assert second.cpu.value == 50.0
    assert second.load.value == (1.5, 0.5, 0.25)


@given(st.text(max_size=60))
def test_a_stat_line_is_read_or_refused(line: str) -> None:
    parse_stat(line)
    stat = parse_stat(f"1 ({line}) S 1" + " 7" * 20)
    assert not isinstance(stat, Unavailable)
    assert (stat.name, stat.parent, stat.start) == (line, 1, 7)


def links(*counts: tuple[int, int]) -> tuple[NvLink, ...]:
    return tuple(
        NvLink(i, Reading(True, "nvml"), tx=Reading(tx, "nvml"), rx=Reading(rx, "nvml"))
        for i, (tx, rx) in enumerate(counts)
    )


def test_a_counter_that_went_back_gives_no_negative_rate() -> None:
    _, sums = link_rate("GPU-a", links((100, 10), (200, 20)), None, 1.0)
    rate, sums = link_rate("GPU-a", links((300, 10), (200, 40)), sums, 3.0)
    assert (rate.tx.value, rate.rx.value) == (100.0, 10.0)
    rate, sums = link_rate("GPU-a", links((0, 0), (0, 0)), sums, 4.0)
    assert isinstance(rate.tx.value, Unavailable)
    assert sums == (4.0, 0, 0)


# -- logs


def test_a_log_is_read_back_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    log = MomentLog(path)
    with Monitor("hostile", moving=True) as monitor:
        moments = [monitor.read() for _ in range(4)]
    for moment in moments:
        log.write(moment)
    log.close()
    assert list(read_moments(path)) == moments
    assert last_moment(path) == moments[-1]
    with path.open("a") as file:
        file.write('{"cut')  # the writer was killed
    assert list(read_moments(path)) == moments
    with pytest.raises(UsageError):
        MomentLog(path)


plain = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.text(max_size=3)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(st.sampled_from("abc=+-"), inner, max_size=4)
    ),
    max_leaves=12,
)


@given(plain, plain)
def test_changes_lead_from_one_value_to_the_other(old: object, new: object) -> None:
    made = json.loads(json.dumps(changes(old, new)))
    # Compared as JSON: to Python, True is 1.
    assert json.dumps(applied(old, made), sort_keys=True) == json.dumps(new, sort_keys=True)
    assert changes(new, new) == {}


@given(plain, plain)
def test_changes_that_do_not_fit_are_refused(value: object, made: object) -> None:
    with contextlib.suppress(DataError):
        applied(value, made)


def test_a_long_log_is_small_and_can_be_jumped_in(tmp_path: Path) -> None:
    path = tmp_path / "long.jsonl"
    log = MomentLog(path)
    with Monitor("8xh100", moving=True) as monitor:
        moments = [monitor.read() for _ in range(WHOLE_EVERY + 15)]
    for moment in moments:
        log.write(moment)
    log.close()
    sizes = [len(line) for line in path.read_bytes().splitlines()[1:]]
    assert min(sizes) * 5 < max(sizes)
    with ReplayedLog(path) as replayed:
        seen = [replayed.read() for _ in moments]
        assert seen == moments
        assert replayed.read() is None
        at = len(moments) - 1
        for by in (-3, -WHOLE_EVERY, 1, 20, -1, -500, 500):
            at = max(0, min(len(moments), at + by)) if by != 500 else len(moments)
            replayed.step(by)
            found = replayed.read()
            if at == len(moments):
                assert found is None
                break
            assert found == moments[at]


HEAD = '{"schema": "gpuprobe.monitor-log", "version": [2, 0], "gpuprobe": "0.1.0"}\n'


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("", DataError),
        ("[1]\n", DataError),
        ('{"format": "other"}\n', DataError),
        (HEAD.replace("[2, 0]", "[1, 0]"), UnsupportedSchema),
        (HEAD.replace("[2, 0]", "[3, 0]"), UnsupportedSchema),
        (HEAD.replace("[2, 0]", "[2]"), DataError),
        (HEAD + '{"moment": {"inventory": 3}}\n', DataError),
        (HEAD + '{"changes": {}}\n', DataError),
        (HEAD + "no\n", DataError),
    ],
)
def test_a_file_that_is_no_log_is_refused(tmp_path: Path, text: str, error: type) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(text)
    with pytest.raises(error):
        list(read_moments(path))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--replay", "nope"], "no such file: nope"),
        (["--replay", ".", "--once"], "cannot read .: it is a folder, not a file"),
    ],
)
def test_what_cannot_be_opened_is_one_clear_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    options: list[str],
    says: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["top", *options]) == 2
    assert capfd.readouterr().err.splitlines()[0] == f"gpuprobe: error: {says}"
    for log in (ReplayedLog, MomentLog):
        with pytest.raises(UsageError, match=r"no/a\.jsonl"):
            log(tmp_path / "no" / "a.jsonl")


def test_what_each_gpu_does_for_each_process() -> None:
    """Processes share what the GPU is busy with; in MIG mode the driver does not tell."""
    with Monitor("8xh100") as monitor:
        for _ in range(3):
            moment = monitor.read()
            work = {one.device: one.processes for one in moment.work}
            assert len(work) == len(moment.inventory.devices)
            for device in moment.inventory.devices:
                listed = {p.pid for p in moment.inventory.processes if p.device == device.key}
                told = work[device.key].value
                if device.identity.mig_instances:
                    assert work[device.key].status is ReadStatus.UNSUPPORTED
                    continue
                assert not isinstance(told, Unavailable)
                assert {one.pid for one in told} <= listed
                busy = device.utilisation.gpu.value
                assert not isinstance(busy, Unavailable)
                assert busy - len(listed) < sum(one.sm for one in told) <= busy or not listed
        assert {e.what for e in moment.inventory.errors} == set()
        # What a device cannot tell is asked once, not each second.
        assert monitor._fleet is not None
        monitor._fleet.devices[1]["utilisation"] = [0, 0]
        monitor._fleet.devices[2]["utilisation"] = {"error": "no_permission"}
        moment = monitor.read()
    by_index = [one.processes for one in moment.work]
    assert by_index[1].value == ()
    assert by_index[2].status is ReadStatus.DENIED
    rows = {row.gpu: row for row in process_rows(moment, ListOptions(sort="sm"))}
    assert (rows["0"].sm, rows["0"].sm_text) == (98, "98%")
    assert (rows["1"].sm, rows["1"].sm_text) == (0, "0%")
    assert rows["2"].sm is None
    assert rows["2"].sm_text == "denied"
