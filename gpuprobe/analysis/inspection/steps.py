"""One step, and what the traces of several have in common."""

from __future__ import annotations

from dataclasses import dataclass

from gpuprobe.analysis.growth.leaks import Leaks, leaks, leaks_over_steps
from gpuprobe.analysis.peak.high_water import (
    Share,
    as_text,
    by_category,
    by_line,
    by_module,
    high_water,
)
from gpuprobe.analysis.reserved.fragmentation import Fragmentation, fragmentation
from gpuprobe.errors import DataError
from gpuprobe.model.run.recording import RankRecording
from gpuprobe.model.run.session import Step
from gpuprobe.model.values import ReadStatus, Unavailable

MOST_TRACES = 12
"""Traced steps that are searched for leaks, the newest and the first: each costs a read."""


@dataclass(frozen=True, slots=True)
class StepPeak:
    """What was allocated at the peak of one step on one device. Sums to ``allocated`` bytes."""

    device: str
    allocated: int
    phase: str
    categories: tuple[Share[str], ...]
    lines: tuple[Share[str], ...]
    modules: tuple[Share[str], ...]


def step_peak(rank: RankRecording, step: Step) -> StepPeak | Unavailable:
    """What the highest of the step's traces holds at its peak; `Unavailable` where it has none."""
    try:
        marks = [high_water(trace) for trace in rank.traces_of(step)]
    except DataError as error:
        return Unavailable(str(error))
    if not marks:
        reason = (
            "this step was not traced: only the first steps and those with a new peak are"
            if rank.session.level == "trace"
            else "needs a recording at level 'trace'"
        )
        return Unavailable(reason, ReadStatus.NOT_COLLECTED)
    mark = max(marks, key=lambda m: m.allocated)
    return StepPeak(
        mark.device,
        mark.allocated,
        mark.phase,
        by_category(mark),
        as_text(by_line(mark)),
        by_module(mark),
    )


@dataclass(frozen=True, slots=True)
class Insight:
    """What only traces hold: how the memory was cut up at the end of ``step`` (the newest traced
    one; None for a snapshot), and which lines leave memory allocated.
    """

    step: int | None
    fragmentation: Fragmentation | Unavailable
    leaks: Leaks | Unavailable


def insight(rank: RankRecording, device: str) -> Insight:
    """Read the traces of one device, of `MOST_TRACES` steps at most."""
    traced = [step for step in rank.steps if step.traces]
    if len(traced) > MOST_TRACES:
        half = MOST_TRACES // 2
        traced = traced[:half] + traced[-half:]
    try:
        if not rank.steps:
            traces = [trace for trace in rank.load_traces() if device in ("", trace.device)]
        else:
            traces = [
                trace for s in traced for trace in rank.traces_of(s) if trace.device == device
            ]
        if traces:
            last = traces[-1]
            found = leaks_over_steps(traces) if rank.steps else leaks(last)
            return Insight(last.step, fragmentation(last), found)
    except DataError as error:  # of a file, or of what is in it
        failed = Unavailable(str(error))
        return Insight(None, failed, failed)
    why = "no step has been traced yet" if rank.session.level == "trace" else "needs level 'trace'"
    nothing = Unavailable(why, ReadStatus.NOT_COLLECTED)
    return Insight(None, nothing, nothing)
