"""Traces are opened once, whoever asks; what is shown of a peak is what the analysis says."""

from __future__ import annotations

import gc
import threading
from pathlib import Path

import pytest
from view_recordings import Run

from gpuprobe.analysis.inspection.steps import StepPeak
from gpuprobe.analysis.inspection.trace import GROUPINGS, TraceRef, trace_refs
from gpuprobe.analysis.peak.needs import NOT_TRACED
from gpuprobe.analysis.peak.peaks import as_text, by_category, by_line, by_module, high_water
from gpuprobe.api.recordings import load
from gpuprobe.model.io.files import gc_paused
from gpuprobe.model.run.recording import RankRecording
from gpuprobe.model.trace import Frame
from gpuprobe.model.values import Unavailable
from gpuprobe.recording.reader import excerpt
from gpuprobe.tui.viewer.reading import MOST_OPEN, OpenTraces


@pytest.fixture
def rank(tmp_path: Path) -> RankRecording:
    run = Run(tmp_path)
    for index in range(6):
        run.step(traced=index != 2)
    run.end()
    return load(run.path).ranks[0]


def test_a_trace_is_opened_once_by_many_threads(rank: RankRecording) -> None:
    names = trace_refs(rank)
    assert [name.step for name in names] == [0, 1, 3, 4, 5]
    traces, found = OpenTraces(), []
    threads = [
        threading.Thread(target=lambda: found.append(traces.of(rank, names[0]))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    assert all(looks is found[0] for looks in found)
    for name in names[1 : MOST_OPEN + 1]:  # so many that the first is closed
        traces.of(rank, name)
    assert traces.of(rank, names[0]) is not found[0]


def test_the_peak_is_that_of_the_analysis(rank: RankRecording) -> None:
    traces = OpenTraces()
    for place in (0, 3):
        mark = high_water(next(rank.traces.of(rank.steps[place])))
        peak = traces.peak(rank, place)
        assert isinstance(peak, StepPeak)
        assert peak.allocated == mark.allocated
        assert peak.phase == mark.phase
        assert peak.categories == by_category(mark)
        assert peak.lines == as_text(by_line(mark))
        assert peak.modules == by_module(mark)
    untraced = traces.peak(rank, 2)
    assert isinstance(untraced, Unavailable)
    assert "those that --trace-steps selects" in untraced.reason


def test_every_moment_sums_up_and_every_block_is_explained(rank: RankRecording) -> None:
    (look,) = OpenTraces().of(rank, TraceRef(1, 1))
    for position in range(0, len(look), 7):
        for grouping in GROUPINGS:
            moment = look.state(position, grouping)
            assert sum(group.bytes for group in moment.groups) == moment.allocated
            assert sum(moment.categories.values()) == moment.allocated
            assert sum(g.bytes for _, part in moment.tree for g in part) == moment.allocated
        segments = look.layout(position)
        assert not isinstance(segments, Unavailable)
        assert sum(segment.allocated_size for segment in segments) == look.allocated[position]
        assert sum(segment.total_size for segment in segments) == moment.reserved
    for group in look.state(look.peak, "block").groups:
        block = look.block(group.rows[0], look.peak)
        assert block.life == block.need == NOT_TRACED
        assert block.allocated_at <= look.peak
        assert block.freed_at is None or block.freed_at > look.peak
        assert group.key == hex(block.address)
        assert block.frames[1].filename.endswith("model.py")
    event = look.event(look.peak)
    assert event is not None
    assert event.action == "alloc"
    assert look.event(0) is None


def test_the_collector_of_cycles_is_as_it_was() -> None:
    assert gc.isenabled()
    with gc_paused():
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(ZeroDivisionError), gc_paused():
        1 / int("0")
    assert gc.isenabled()
    gc.disable()
    try:
        with gc_paused():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_source_is_shown_only_of_regular_python_files(tmp_path: Path) -> None:
    (tmp_path / "m.py").write_text("a\nb\n\x1b[31mc\nd\ne\n", "utf-8")
    found = excerpt(Frame("m.py", 3, "f"), cwd=str(tmp_path), since=1.0, around=1)
    assert not isinstance(found, Unavailable)
    assert [number for number, _ in found.lines] == [2, 3, 4]
    assert found.changed
    (tmp_path / "dir.py").mkdir()
    (tmp_path / "link.py").symlink_to("/dev/zero")
    for name, line in (("m.py", 9), ("gone.py", 1), ("dir.py", 1), ("link.py", 1), ("m.txt", 1)):
        assert isinstance(excerpt(Frame(name, line, "f"), cwd=str(tmp_path)), Unavailable)
    assert isinstance(excerpt(Frame("x\0.py", 1, "f")), Unavailable)


def test_positions_have_phases_and_times(rank: RankRecording) -> None:
    look = OpenTraces().of(rank, trace_refs(rank)[0])[0]
    for position in range(1, len(look)):
        event = look.event(position)
        assert event is not None
        assert look.phase_at(position) == event.phase
        first = look.event(1)
        assert first is not None
        expected = (event.time_us - first.time_us) * 1000 if first.time_us else None
        assert look.time_at(position) == expected
    assert look.phase_at(0) == look.phase_at(1)
