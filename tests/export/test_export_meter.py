"""Reading again and again: what is lost, hangs or goes away, and what comes back."""

from __future__ import annotations

import os
import queue
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pynvml
import pytest

from gpuprobe.errors import UsageError
from gpuprobe.exporter.readings import (
    STALE,
    ExportSettings,
    MachineMetrics,
    Measured,
    ReadingThread,
    families_of,
)
from gpuprobe.exporter.runs import LINGER, MAX_RANKS, RunWatch
from gpuprobe.model.run.session import Environment, Session, SessionEnd, Step
from gpuprobe.model.values import Unavailable
from gpuprobe.probes.health import facts
from gpuprobe.probes.health.base import KernelMessage
from gpuprobe.recording.writer import RecordingWriter
from gpuprobe.reporters.metrics.metrics import Family
from gpuprobe.testing import fake_fleet, load_fleet
from gpuprobe.testing.fake_nvml import FakeNvml
from gpuprobe.testing.fleet import Fleet


def values(families: list[Family], name: str, **labels: str) -> list[float]:
    """The values of a metric, of the samples with (at least) these labels."""
    return [
        sample.value
        for one in families
        if one.metric.name == name
        for sample in one.samples
        if labels.items() <= dict(zip(one.metric.labels, sample.labels, strict=True)).items()
    ]


# -- devices


@pytest.fixture
def fleet() -> Iterator[Fleet]:
    with fake_fleet(load_fleet("8xh100")) as fleet:
        yield fleet


def test_a_gpu_that_is_lost_hides_no_other_and_comes_back(fleet: Fleet) -> None:
    with MachineMetrics(ExportSettings(discover=False)) as meter:
        first = families_of(meter.read())
        fleet.devices[2]["lost"] = True
        second = families_of(meter.read())
        del fleet.devices[2]["lost"]
        third = families_of(meter.read())
    uuid = fleet.devices[2]["uuid"]
    assert values(first, "gpuprobe_gpu_up") == [1] * 8
    assert values(second, "gpuprobe_gpu_up", uuid=uuid, index="2") == [0]
    assert sum(values(second, "gpuprobe_gpu_up")) == 7
    assert not values(second, "gpuprobe_gpu_power_watts", index="2")
    assert len(values(second, "gpuprobe_gpu_power_watts")) == 7
    assert values(second, "gpuprobe_read_errors", source="nvml", status="lost")
    assert values(third, "gpuprobe_gpu_up") == [1] * 8


def test_a_driver_that_goes_away_and_returns(fleet: Fleet) -> None:
    with MachineMetrics(ExportSettings(discover=False)) as meter:
        assert meter.read().messages == ()
        library = pynvml.nvmlLib
        pynvml.nvmlLib = FakeNvml(load_fleet("no-driver"))
        pynvml._nvmlGetFunctionPointer_cache.clear()
        gone = [meter.read(), meter.read()]
        pynvml.nvmlLib = library
        pynvml._nvmlGetFunctionPointer_cache.clear()
        back = meter.read()
    (message,) = gone[0].messages
    assert "kernel driver is not loaded" in message
    assert gone[1].messages == ()  # said once
    for measured in gone:
        assert not measured.anything
        assert values(families_of(measured), "gpuprobe_source_up") == [0]
        assert not measured.gpus
    assert back.messages == ("nvml: responds again",)
    assert values(families_of(back), "gpuprobe_gpu_up") == [1] * 8
    assert values(families_of(back), "gpuprobe_source_up", source="nvml") == [1]


def test_no_cuda_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    import ctypes

    opened: list[str] = []
    with fake_fleet("8xh100"), MachineMetrics(ExportSettings(discover=False, processes=5)) as meter:
        load = ctypes.CDLL

        def watched(name: Any, *args: Any, **options: Any) -> Any:
            opened.append(str(name))
            return load(name, *args, **options)

        monkeypatch.setattr(ctypes, "CDLL", watched)
        meter.read()
        monkeypatch.undo()
    assert not [name for name in opened if "cuda" in name]


def test_an_unknown_fleet_is_said_before_anything_starts() -> None:
    with pytest.raises(UsageError, match="no such fleet"):
        MachineMetrics(ExportSettings(demo="3xbanana"))


def test_xids_are_counted_once_and_kept(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    bus = fleet.devices[1]["pci"].lower().partition(".")[0]
    uuid = fleet.devices[1]["uuid"]

    def line(seconds: float, code: int) -> KernelMessage:
        return KernelMessage(seconds, f"NVRM: Xid (PCI:{bus[-10:]}): {code}, pid=1, words")

    log: list[KernelMessage] = [line(1.0, 31), line(2.0, 31)]
    monkeypatch.setattr(facts, "read_kernel_log", lambda: tuple(log))

    def counted(measured: Measured) -> dict[str, float]:
        found = families_of(measured)
        return {
            code: sum(values(found, "gpuprobe_gpu_xid_errors_total", uuid=uuid, xid=code))
            for code in ("31", "79")
        }

    with MachineMetrics(ExportSettings(discover=False)) as meter:
        assert counted(meter.read()) == {"31": 2, "79": 0}
        assert counted(meter.read()) == {"31": 2, "79": 0}
        log.append(line(3.0, 79))  # it falls off the bus: from here on it has no bus id
        fleet.devices[1]["handle"] = {"error": "gpu_is_lost"}
        assert counted(meter.read()) == {"31": 2, "79": 1}
        del log[:2]  # the ring buffer moves on
        assert counted(meter.read()) == {"31": 2, "79": 1}
        monkeypatch.setattr(facts, "read_kernel_log", lambda: Unavailable("no permission"))
        assert not values(families_of(meter.read()), "gpuprobe_gpu_xid_errors_total")


# -- the reading thread


class SlowMeter(MachineMetrics):
    """Waits to be let go before each reading."""

    def __init__(self) -> None:
        super().__init__(ExportSettings(demo="empty"))
        self.go = threading.Semaphore(0)
        self.reading = threading.Semaphore(0)
        self.fails: BaseException | None = None

    def read(self) -> Measured:
        self.reading.release()
        self.go.acquire()
        if self.fails is not None:
            raise self.fails
        return super().read()


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


Slow = tuple[SlowMeter, ReadingThread, Clock, "queue.SimpleQueue[str | BaseException]"]


@pytest.fixture
def slow() -> Iterator[Slow]:
    meter, clock = SlowMeter(), Clock()
    reports: queue.SimpleQueue[str | BaseException] = queue.SimpleQueue()
    reader = ReadingThread(meter, interval=10, report=reports.put, clock=clock)
    yield meter, reader, clock, reports
    for _ in range(10):
        meter.go.release()
    reader.close()


def test_many_scrapes_share_one_reading(slow: Slow) -> None:
    meter, reader, _, _ = slow
    got: list[Measured | None] = []
    threads = [
        threading.Thread(target=lambda: got.append(reader.measured(30)), daemon=True)
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    meter.reading.acquire()
    meter.go.release()
    for thread in threads:
        thread.join(30)
    assert len(got) == 8
    assert got[0] is not None
    assert len({id(one) for one in got}) == 1
    assert not meter.reading.acquire(blocking=False)


def test_a_driver_that_hangs_holds_up_no_scrape(slow: Slow) -> None:
    meter, reader, clock, _ = slow
    assert values(reader.families(0.01), "gpuprobe_source_up") == [0]  # waited, in vain
    meter.reading.acquire()
    clock.now = 1e9
    assert reader.measured(1e6) is None  # others waited before: this would take eleven days
    clock.now = 0.0
    meter.go.release()
    assert reader.measured(60) is not None
    assert values(reader.families(60), "gpuprobe_source_up") == [1]


def test_an_old_reading_is_not_told(slow: Slow) -> None:
    meter, reader, clock, _ = slow
    meter.go.release()
    measured = reader.measured(60)
    assert measured is not None
    meter.reading.acquire()
    clock.now = 11  # too old to serve, not too old to tell
    assert values(reader.families(0.01), "gpuprobe_source_up") == [1]
    clock.now = STALE + 11
    families = reader.families(0.01)
    assert values(families, "gpuprobe_source_up") == [0]
    assert values(families, "gpuprobe_reading_timestamp_seconds") == [measured.taken_at]
    assert not values(families, "gpuprobe_runs")


def test_a_young_reading_serves_again(slow: Slow) -> None:
    meter, reader, clock, _ = slow
    meter.go.release()
    measured = reader.measured(60)
    assert measured is not None
    clock.now = 9.9
    assert reader.measured(60) is measured


def test_a_fault_of_ours_is_reported(slow: Slow) -> None:
    meter, reader, _, reports = slow
    meter.fails = ZeroDivisionError("a bug")
    meter.go.release()
    assert reader.measured(30) is None
    assert reports.get(timeout=30) is meter.fails
    assert reader.measured(30) is None  # and nobody waits for a thread that is no more


# -- runs


def record(
    path: Path,
    *,
    host: str | None = None,
    pid: int | None = None,
    rank: int = 0,
    world: int = 1,
    end: SessionEnd | None = None,
) -> Path:
    import socket
    import time

    writer = RecordingWriter.create(path, rank=rank, world_size=world)
    environment = Environment("0.1", "3.11", "Linux", host or socket.gethostname())
    pid = os.getpid() if pid is None else pid
    writer.session(
        Session(time.time(), pid, ("x",), "counters", ("cpu",), "/", rank, rank, world),
        environment,
    )
    writer.step(Step(0, 0, 5))
    if end is not None:
        writer.end(end)
    writer.close()
    return path


NOBODY = 2**22 + 1  # beyond the kernel's largest process number


def labels(watch: RunWatch) -> dict[str, str]:
    """Name of the recording -> state of its first rank."""
    return {Path(one.path).name: one.state for one in reversed(watch.read().readings)}


def test_states_of_runs(tmp_path: Path) -> None:
    from gpuprobe.model.run.session import ProgramError

    record(tmp_path / "alive.gpuprobe")
    record(tmp_path / "killed.gpuprobe", pid=NOBODY)
    record(tmp_path / "done.gpuprobe", end=SessionEnd(5))
    record(tmp_path / "failed.gpuprobe", end=SessionEnd(5, ProgramError("ValueError", "no")))
    record(tmp_path / "elsewhere.gpuprobe", host="another-machine")
    (tmp_path / "empty.gpuprobe").mkdir()
    (tmp_path / "notes.txt").write_text("x")
    assert labels(RunWatch([tmp_path])) == {
        "alive.gpuprobe": "running",
        "killed.gpuprobe": "incomplete",
        "done.gpuprobe": "complete",
        "failed.gpuprobe": "failed",
        "elsewhere.gpuprobe": "unknown",
    }


def test_what_ended_long_ago_is_only_exported_where_it_is_named(tmp_path: Path) -> None:
    import time

    alive = record(tmp_path / "alive.gpuprobe")
    done = record(tmp_path / "done.gpuprobe", end=SessionEnd(5))
    later = time.time() + LINGER + 60
    watch = RunWatch([tmp_path], now=lambda: later)
    assert set(labels(watch)) == {"alive.gpuprobe"}
    assert set(labels(watch)) == {"alive.gpuprobe"}
    assert set(labels(RunWatch([done, alive], now=lambda: later))) == {
        "alive.gpuprobe",
        "done.gpuprobe",
    }
    # It is written to again: a run that takes the old one's place.
    stream = done / "rank-00000.jsonl"
    stream.unlink()
    done.rmdir()
    record(done)
    os.utime(stream, (later, later))
    assert set(labels(watch)) == {"alive.gpuprobe", "done.gpuprobe"}


def test_a_run_that_appears_and_goes(tmp_path: Path) -> None:
    named = tmp_path / "later.gpuprobe"
    watch = RunWatch([named, tmp_path])
    first = watch.read()
    assert (first.runs, first.left_out) == (0, 1)
    assert first.problems == {str(named): f"no recording yet: {named}"}
    record(named)
    second = watch.read()
    assert (second.runs, second.left_out) == (1, 0)
    (named / "rank-00000.jsonl").unlink()
    named.rmdir()
    third = watch.read()
    assert (third.runs, third.left_out, set(third.problems)) == (0, 1, {str(named)})


def test_the_number_of_runs_is_bounded(tmp_path: Path) -> None:
    import time

    for number in range(5):
        path = record(tmp_path / f"{number}.gpuprobe", end=SessionEnd(5))
        changed = time.time() - number
        os.utime(path / "rank-00000.jsonl", (changed, changed))
    alive = record(tmp_path / "alive.gpuprobe")
    old = time.time() - 300
    os.utime(alive / "rank-00000.jsonl", (old, old))
    found = RunWatch([tmp_path], most=3).read()
    kept = [Path(one.path).name for one in found.readings]
    assert kept == ["alive.gpuprobe", "0.gpuprobe", "1.gpuprobe"]
    assert (found.runs, found.left_out) == (3, 3)


def test_ranks_of_other_machines_are_left_to_them(tmp_path: Path) -> None:
    shared = tmp_path / "job.gpuprobe"
    for rank in range(4):
        record(shared, host="" if rank % 2 else "another-machine", rank=rank, world=4)
    found = RunWatch([shared]).read()
    assert [one.totals.session.rank for one in found.readings] == [1, 3]
    assert len({one.run for one in found.readings}) == 1


def test_the_number_of_ranks_is_bounded(tmp_path: Path) -> None:
    for rank in range(MAX_RANKS + 3):
        record(tmp_path / "job.gpuprobe", rank=rank, world=MAX_RANKS + 3)
    assert len(RunWatch([tmp_path]).read().readings) == MAX_RANKS


def test_a_recording_that_cannot_be_read_is_said(tmp_path: Path) -> None:
    good = record(tmp_path / "good.gpuprobe")
    bad = tmp_path / "bad.gpuprobe"
    bad.mkdir()
    (bad / "rank-00000.jsonl").write_text('{"schema":"gpuprobe.recording","version":[9,0]}\n')
    found = RunWatch([tmp_path]).read()
    assert [one.path for one in found.readings] == [str(good)]
    assert set(found.problems) == {str(bad)}
    assert found.left_out == 1
    with MachineMetrics(ExportSettings(runs=(str(tmp_path),), demo="empty")) as meter:
        (message,) = meter.read().messages
        assert meter.read().messages == ()
        (bad / "rank-00000.jsonl").unlink()
        assert meter.read().messages == (f"{bad}: is readable again",)
    assert "bad.gpuprobe" in message or "rank-00000" in message


def test_a_file_is_no_run(tmp_path: Path) -> None:
    path = tmp_path / "x.gpuprobe"
    path.write_text("")
    with pytest.raises(UsageError, match="not a directory"):
        RunWatch([path])


def test_what_cannot_be_read_is_said_at_every_look(tmp_path: Path) -> None:
    from gpuprobe.errors import UnsupportedSchema
    from gpuprobe.recording.reader import RecordingTail

    stream = record(tmp_path / "a.gpuprobe") / "rank-00000.jsonl"
    whole = stream.read_text("utf-8")
    stream.write_text(re.sub(r"\[2,\d+\]", "[9,0]", whole, count=1), "utf-8")
    tail = RecordingTail(stream.parent)
    for _ in range(2):
        with pytest.raises(UnsupportedSchema):
            tail.poll()
    stream.write_text(whole, "utf-8")
    assert len(tail.poll().steps) == 1


RECORDER = """
import os, sys
from pathlib import Path
from gpuprobe.model.run.session import Environment, Session, Step
from gpuprobe.recording.writer import RecordingWriter
import socket, time
where = sys.argv[2]
host = "a-container" if where == "there" else socket.gethostname()
pid = 2**22 + 1 if where == "pids" else os.getpid()
writer = RecordingWriter.create(Path(sys.argv[1]))
writer.session(
    Session(time.time(), pid, ("x",), "counters", ("cpu",)),
    Environment("0.1", "3.11", "Linux", host),
)
writer.step(Step(0, 0, 5))
print("recording", flush=True)
sys.stdin.read()
"""


def test_runs_of_this_machine_appear_by_themselves(tmp_path: Path) -> None:
    """Also those in containers, whose names for the machine or the process are others."""
    import subprocess
    import sys
    import time

    clock = Clock()
    clock.now = time.time()
    watch = RunWatch([], most=100, discover=True, now=clock)
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", RECORDER, str(tmp_path / f"{where}.gpuprobe"), where],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        for where in ("here", "there", "pids")
    ]
    try:
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline() == b"recording\n"
        found = {path: state for path, state in labels(watch).items() if path in MINE}
        assert found == dict.fromkeys(MINE, "running")
        assert not [one for one in labels(RunWatch([])) if one in MINE]
    finally:
        for process in processes:
            process.kill()
            process.communicate(timeout=60)
    found = {path: state for path, state in labels(watch).items() if path in MINE}
    assert [found[name] for name in MINE] == ["incomplete", "unknown", "incomplete"]
    clock.now += LINGER + 60
    assert not [one for one in labels(watch) if one in MINE]


MINE = ("here.gpuprobe", "there.gpuprobe", "pids.gpuprobe")


def test_a_demo_shows_no_runs_of_this_machine() -> None:
    with MachineMetrics(ExportSettings(demo="empty")) as meter:
        assert meter.read().run_count == 0
