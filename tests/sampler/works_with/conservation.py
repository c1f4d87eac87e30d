"""What must add up in every recorded step, whatever the program does."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from gpuprobe.analysis.peak.peaks import by_category, high_water
from gpuprobe.model.run.session import DeviceWindow, Step
from gpuprobe.model.trace import MemoryTrace
from gpuprobe.model.values import Peak, Unavailable


def check_steps(steps: Iterable[Step], traces: Mapping[str, MemoryTrace]) -> None:
    """Every law of every step; ``traces`` by the names that steps give them."""
    for step in steps:
        _phases_cover(step)
        for window in step.windows:
            _counts_add_up(window)
        for tensors in step.tensors:
            _known_tensors_fit(step, tensors.device)
        marks = [high_water(traces[name]) for name in step.traces]
        for mark in marks:
            assert sum(share.bytes for share in by_category(mark)) == mark.allocated
        for window in step.windows:
            peak = window.peak_allocated
            mine = [m.allocated for m in marks if m.device == window.device]
            if mine and window.device == "cpu":
                assert isinstance(peak, Peak)
                assert peak.exact
                assert max(mine) == peak.at_least


def _phases_cover(step: Step) -> None:
    tops = [phase for phase in step.phases if "/" not in phase.path]
    assert sum(phase.duration_ns for phase in tops) == step.duration_ns
    by_path = {phase.path: phase for phase in step.phases}
    for phase in step.phases:
        if "/" in phase.path:
            assert phase.duration_ns <= by_path[phase.path.rpartition("/")[0]].duration_ns


def _counts_add_up(window: DeviceWindow) -> None:
    for counts in (window.start, window.end):
        if isinstance(counts.allocated, Unavailable) or isinstance(counts.reserved, Unavailable):
            continue
        assert not isinstance(counts.pending, Unavailable)
        assert not isinstance(counts.cached, Unavailable)
        assert counts.allocated + counts.pending + counts.cached == counts.reserved
        assert counts.cached >= 0
        assert counts.pending >= 0


def _known_tensors_fit(step: Step, device: str) -> None:
    """Known tensors and the rest are what is allocated at the step's end, none of it negative."""
    (tensors,) = [t for t in step.tensors if t.device == device]
    window = next((w for w in step.windows if w.device == device), None)
    if isinstance(tensors.rest, Unavailable):
        return
    assert tensors.rest >= 0, tensors
    if window is not None and not isinstance(window.end.allocated, Unavailable):
        assert tensors.known + tensors.rest == window.end.allocated
