"""The thread that reads, the model it fills, and the command: without a screen."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuprobe.api.doctor import diagnose, diagnosis_lines
from gpuprobe.errors import DataError
from gpuprobe.model.io.codec import from_plain
from gpuprobe.model.machine.devices import Device, GpuProcess
from gpuprobe.model.machine.diagnosis import Diagnosis
from gpuprobe.model.machine.monitor import Moment
from gpuprobe.model.run.totals import Run
from gpuprobe.probes.monitor import Monitor
from gpuprobe.recording.monitor_log import MomentLog
from gpuprobe.testing import fleets
from gpuprobe.tui.monitor.model import TopModel
from gpuprobe.tui.monitor.reader_thread import (
    Crashed,
    Done,
    Ended,
    Failed,
    MachineReader,
    ReaderThread,
    Taken,
)
from gpuprobe.tui.widgets.styled_text import line_width, text_of


def moments(fleet: str = "8xh100", count: int = 2) -> list[Moment]:
    with Monitor(fleet, moving=True) as monitor:
        return [monitor.read() for _ in range(count)]


class Counting:
    """Counts its readings; each is what ``answer`` makes of the number."""

    def __init__(self, answer: Callable[[int], Moment | None]) -> None:
        self.answer = answer
        self.reads = 0
        self.opened = 0
        self.closed = 0

    def read(self) -> Moment | None:
        self.reads += 1
        return self.answer(self.reads)

    @contextmanager
    def open(self) -> Iterator[MachineReader]:
        self.opened += 1
        try:
            yield self
        finally:
            self.closed += 1


class Box:
    """Messages, to be waited for."""

    def __init__(self) -> None:
        self.messages: list[object] = []
        self._there = threading.Condition()

    def put(self, message: object) -> None:
        with self._there:
            self.messages.append(message)
            self._there.notify_all()

    def wait(self, count: int) -> list[object]:
        with self._there:
            assert self._there.wait_for(lambda: len(self.messages) >= count, 20)
        return self.messages


MOMENT = moments()[-1]


def test_a_slow_screen_gets_fewer_readings_and_no_queue() -> None:
    reader, box = Counting(lambda n: MOMENT), Box()
    feed = ReaderThread(reader.open, box.put, interval=0.0)
    feed.start()
    box.wait(1)
    # Not taken yet: one reading may be made meanwhile, but none is posted.
    feed.run_job(lambda: None, print)  # never posted before the reading is taken
    assert box.messages == [Taken(MOMENT)]
    for expected in range(2, 6):
        feed.taken()
        box.wait(expected)
        assert len(box.messages) == expected
    assert reader.reads <= len(box.messages) + 1
    feed.stop()
    assert not feed._thread.is_alive()
    assert (reader.opened, reader.closed) == (1, 1)


def test_paused_it_reads_when_asked_only() -> None:
    reader, box = Counting(lambda n: MOMENT), Box()
    feed = ReaderThread(reader.open, box.put, interval=0.0)
    feed.pause(True)
    feed.start()
    box.wait(1)
    feed.taken()
    done = threading.Event()
    feed.run_job(done.set, print)
    assert done.wait(20)  # jobs are done while it is paused
    box.wait(2)
    feed.taken()
    assert reader.reads == 1
    feed.hurry()
    box.wait(3)
    assert reader.reads == 2
    feed.stop()


def test_failures_are_told_and_the_source_is_opened_again() -> None:
    def answer(number: int) -> Moment | None:
        if number == 1:
            raise DataError("broken")
        if number == 2:
            raise OSError("gone")
        return None if number > 3 else MOMENT

    reader, box = Counting(answer), Box()
    feed = ReaderThread(reader.open, lambda m: (box.put(m), feed.taken()), interval=0.0)
    feed.start()
    found = box.wait(4)[:4]
    assert found == [Failed("broken"), Failed("gone"), Taken(MOMENT), Ended()]
    feed.stop()
    assert reader.opened == 3
    assert reader.closed == 3


def test_a_fault_is_handed_over_and_a_failed_job_as_well() -> None:
    def fault(number: int) -> Moment:
        raise KeyError("a bug")

    box = Box()
    feed = ReaderThread(Counting(fault).open, box.put, interval=0.0)
    feed.start()
    (crashed,) = box.wait(1)
    assert isinstance(crashed, Crashed)
    assert isinstance(crashed.error, KeyError)
    feed.stop()

    def job() -> object:
        raise DataError("no")

    other = Box()
    feed = ReaderThread(
        Counting(lambda n: MOMENT).open, lambda m: (other.put(m), feed.taken()), 3600
    )
    feed.start()
    feed.run_job(job, print)
    done = other.wait(2)[1]
    assert isinstance(done, Done)
    assert isinstance(done.result, DataError)
    feed.stop()


# -- the model


@pytest.mark.parametrize("fleet", sorted(fleets()))
@pytest.mark.parametrize("columns", [40, 60, 100, 300])
def test_every_line_is_as_wide_as_the_screen(fleet: str, columns: int) -> None:
    model = TopModel()
    empty = [model.title(columns), model.host(columns), model.note(columns)]
    for one in moments(fleet):
        model.add(one)
    model.runs = (Run("/a/b.gpuprobe", (1, 2), None),)
    model.replayed, model.paused, model.ended = "log\x1b.jsonl", True, True
    lines = [*empty, model.title(columns), model.host(columns), model.note(columns)]
    lines += model.process_headings(columns)[1]
    lines += model.detail(columns, 9)
    for line in lines:
        assert line_width(line) == columns
        assert text_of(line).isprintable() or not text_of(line)


def test_what_was_there_stays_while_the_driver_is_gone() -> None:
    model = TopModel()
    model.add(MOMENT)
    model.choose(3)
    gone = moments("no-driver", 1)[0]
    model.add(gone)
    assert len(model.devices) == 8
    assert model.chosen_at == 3
    assert "no GPU is available" in model.notes()[0]
    assert "badge-bad" in {role for _, role in model.note(80)}
    model.add(MOMENT)
    assert not model.failure
    assert model.chosen_at == 3


def test_pins_of_processes_that_ended_are_forgotten() -> None:
    model = TopModel()
    model.add(MOMENT)
    for row in model.processes[:3]:
        model.pin(row)
    assert len(model.options.pinned) == 3
    left = replace(MOMENT, processes=MOMENT.processes[:1])
    kept = MOMENT.inventory.processes[:1]
    model.add(replace(left, inventory=replace(MOMENT.inventory, processes=kept)))
    assert len(model.options.pinned) <= 1


def test_a_process_that_is_recorded_is_marked() -> None:
    model = TopModel()
    model.add(MOMENT)
    pid = model.processes[0].pid
    model.runs = (Run("/a/b.gpuprobe", (pid,), None),)
    columns, _ = model.process_headings(100)
    assert "◉" in text_of(model.process_line(model.processes[0], columns))
    assert "◉" not in text_of(model.process_line(model.processes[1], columns))
    assert "1 run recorded" in text_of(model.host(100))


def test_a_process_has_its_own_run_before_its_parent_s() -> None:
    model = TopModel()
    model.add(MOMENT)
    row = replace(model.processes[0], parent=7)
    theirs, own = Run("/a/a.gpuprobe", (7,), None), Run("/a/b.gpuprobe", (row.pid,), None)
    model.runs = (theirs, own)
    assert model.run_of(row) is own
    model.runs = (theirs,)
    assert model.run_of(row) is theirs  # a worker of a run
    assert model.run_of(replace(row, parent=8)) is None


@given(
    st.sampled_from(["", "alice", "python user:bob", "nothing"]),
    st.sampled_from(["memory", "user", "pid", "age"]),
    st.booleans(),
    st.booleans(),
)
def test_what_is_exported_is_what_is_shown(
    needle: str, sort: str, reverse: bool, tree: bool
) -> None:
    model = TopModel()
    model.add(MOMENT)
    model.change(needle=needle, sort=sort, reverse=reverse, tree=tree)
    document = json.loads(json.dumps(model.export()))
    listed = [from_plain(GpuProcess, plain) for plain in document["processes"]]
    shown = [row.pid for row in model.processes if row.device]
    assert [process.pid for process in listed] == shown
    assert tuple(from_plain(Device, d) for d in document["devices"]) == MOMENT.inventory.devices
    assert TopModel().export()["schema"] == document["schema"]


# -- the doctor's lines


@pytest.mark.parametrize("fleet", sorted(fleets()))
def test_a_diagnosis_fits_every_width_and_leaves_nothing_out(fleet: str) -> None:
    found = diagnose(fleet)
    commands = {finding.fix.code for finding in found.findings if finding.fix is not None}
    for columns in (30, 60, 100, 200):
        lines = [line.text for line in diagnosis_lines(found, columns)]
        text = " ".join(" ".join(line.split()) for line in lines)
        for finding in found.findings:
            assert finding.rule in text
        for entry in found.not_checked:
            assert entry.rule.id in text
        for line in lines:
            # A command is never broken, so that it can be copied; all else fits.
            if line.strip() not in commands:
                assert len(line) <= columns
    assert (f"Passed ({len(found.passed)})" in text) == bool(found.passed)
    assert "demo fleet" in lines[0]


def test_a_machine_without_anything_found_says_so() -> None:
    assert "Nothing found" in diagnosis_lines(Diagnosis(0.0), 80)[0].text


# -- the command


def gpuprobe(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "gpuprobe", *args],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        stdin=subprocess.DEVNULL,
    )


def test_a_log_is_printed_and_wrong_options_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    log = MomentLog(path)
    log.write(MOMENT)
    log.close()
    done = gpuprobe("top", "--replay", str(path), "--once")
    assert (done.returncode, done.stderr) == (0, "")
    assert "H100" in done.stdout
    (tmp_path / "none.jsonl").write_text("{}\n")
    for code, *args in (
        (2, "--replay", str(path), "--demo"),
        (2, "--readonly", "--log", str(tmp_path / "b.jsonl"), "--demo"),
        (2, "--log", str(tmp_path / "b.jsonl"), "--demo"),
        (4, "--replay", str(tmp_path / "none.jsonl")),
    ):
        refused = gpuprobe("top", *map(str, args))
        assert refused.returncode == code, refused.stderr
        assert refused.stderr.startswith("gpuprobe: ")
        assert "Traceback" not in refused.stderr
    assert not (tmp_path / "b.jsonl").exists()


QUIET = """
import sys
from gpuprobe.tui.monitor.app import TopApp
import asyncio

async def main():
    app = TopApp("8xh100", interval=0.05)
    async with app.run_test(size=(100, 30)) as pilot:
        while len(app.model.history.host_cpu()) < 4:
            await pilot.pause(0.02)

asyncio.run(main())
maps = open("/proc/self/maps").read()
print([name for name in ("torch", "pycuda", "numpy") if name in sys.modules], "libcuda" in maps)
"""


def test_the_screen_makes_no_cuda_context() -> None:
    """Without libcuda and torch in the process there is nothing to make one with."""
    done = subprocess.run(
        [sys.executable, "-c", QUIET], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "[] False"
