"""Recordings on a screen: followed while they are written, looked into step by step."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from gpuprobe.errors import DataError
from gpuprobe.model.values import ReadStatus, Unavailable

if TYPE_CHECKING:
    from gpuprobe.analysis.highwater import Share
    from gpuprobe.model.recording import RankRecording, Recording
    from gpuprobe.model.session import Step

__all__ = ["Followed", "StepPeak", "is_running", "step_peak"]


class Followed:
    """A recording or a snapshot that is open on a screen.

    `poll` reads what is new of a recording, and a snapshot once. Both raise what
    `gpuprobe.load` raises.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        from gpuprobe.api.recordings import load
        from gpuprobe.recording.reader import RecordingTail

        self.path = Path(path)
        self._tail = RecordingTail(self.path) if self.path.is_dir() else None
        self._whole: Recording | None = None if self._tail else load(self.path)

    def poll(self) -> Recording:
        """What is on disk now."""
        if self._whole is not None:
            return self._whole
        assert self._tail is not None
        return self._tail.poll()


def is_running(rank: RankRecording) -> bool:
    """Whether the process that writes this rank may still be writing."""
    from gpuprobe.api.recordings import _is_running

    return rank.end is None and _is_running(rank) is not False


@dataclass(frozen=True, slots=True)
class StepPeak:
    """What was alive at the peak of one step on one device. Sums to ``allocated`` bytes."""

    device: str
    allocated: int
    phase: str
    categories: tuple[Share, ...]
    lines: tuple[Share, ...]
    modules: tuple[Share, ...]


def step_peak(rank: RankRecording, step: Step) -> StepPeak | Unavailable:
    """The highest of the step's traces, looked at; `Unavailable` where it has none."""
    from gpuprobe.analysis.highwater import by_category, by_line, by_module, high_water

    try:
        marks = [high_water(trace) for trace in rank.traces_of(step)]
    except DataError as error:
        return Unavailable(str(error))
    if not marks:
        reason = (
            "this step has no trace: the first steps and those with a new peak have one"
            if rank.session.level == "trace"
            else "needs a recording at level 'trace'"
        )
        return Unavailable(reason, ReadStatus.NOT_COLLECTED)
    mark = max(marks, key=lambda m: m.allocated)
    return StepPeak(
        mark.device, mark.allocated, mark.phase, by_category(mark), by_line(mark), by_module(mark)
    )
