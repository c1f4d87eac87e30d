"""Details of one step, of the traces of several, and of a rank that is being recorded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from gpuprobe.analysis.completeness import missing_of
from gpuprobe.analysis.fragmentation import Fragmentation, fragmentation
from gpuprobe.analysis.leaks import Leaks, leaks, leaks_over_steps
from gpuprobe.analysis.peak.needs import need_of_each
from gpuprobe.analysis.peak.peaks import (
    HighWater,
    Share,
    as_text,
    by_category,
    by_line,
    by_module,
    high_water,
    shares,
)
from gpuprobe.analysis.time_shares import full_steps, time_shares
from gpuprobe.errors import DataError
from gpuprobe.model.run.recording import RankRecording
from gpuprobe.model.run.session import Step
from gpuprobe.model.values import Peak, ReadStatus, Unavailable

MOST_TRACES = 12
"""Traced steps that are searched for leaks, the first and the newest: each has to be read."""


@dataclass(frozen=True, slots=True)
class StepPeak:
    """The memory at the peak of one step on one device; each breakdown sums to ``allocated``.
    ``needs``: by `Need`, empty if the uses of memory were not traced.
    """

    device: str
    allocated: int
    phase: str
    categories: tuple[Share[str], ...]
    lines: tuple[Share[str], ...]
    modules: tuple[Share[str], ...]
    needs: tuple[Share[str], ...] = ()


def step_peak(rank: RankRecording, step: Step) -> StepPeak | Unavailable:
    """The memory at the highest peak of a step's traces; `Unavailable` if it has none."""
    try:
        marks = [high_water(trace) for trace in rank.traces.of(step)]
    except DataError as error:
        return Unavailable(str(error))
    if not marks:
        reason = (
            "this step was not traced: only the first ones are, or those that --trace-steps selects"
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
        _by_need(mark),
    )


def _by_need(mark: HighWater) -> tuple[Share[str], ...]:
    needs = need_of_each(mark.ledger, mark.event)
    if isinstance(needs, Unavailable):
        return ()
    return shares(needs, mark.size, lambda need: need.value)


@dataclass(frozen=True, slots=True)
class Insight:
    """Results that need traces: fragmentation at the end of ``step`` (the newest traced one; None
    for a snapshot), and the lines that leave memory allocated.
    """

    step: int | None
    fragmentation: Fragmentation | Unavailable
    leaks: Leaks | Unavailable


def insight(rank: RankRecording, device: str) -> Insight:
    """Analyse the traces of one device, of at most `MOST_TRACES` steps."""
    traced = [step for step in rank.steps if step.traces]
    if len(traced) > MOST_TRACES:
        half = MOST_TRACES // 2
        traced = traced[:half] + traced[-half:]
    try:
        if not rank.steps:
            traces = [trace for trace in rank.traces if device in ("", trace.device)]
        else:
            traces = [
                trace for s in traced for trace in rank.traces.of(s) if trace.device == device
            ]
        if traces:
            last = traces[-1]
            found = leaks_over_steps(traces) if rank.steps else leaks(last)
            return Insight(last.step, fragmentation(last), found)
    except DataError as error:  # a file that cannot be read, or a damaged trace
        failed = Unavailable(str(error))
        return Insight(None, failed, failed)
    why = "no step has been traced yet" if rank.session.level == "trace" else "needs level 'trace'"
    nothing = Unavailable(why, ReadStatus.NOT_COLLECTED)
    return Insight(None, nothing, nothing)


RECENT = 50
"""The newest steps, whose durations are averaged."""


@dataclass(frozen=True, slots=True)
class RankFacts:
    """A few figures of a rank: durations in ns, sizes in bytes; None if unknown.

    *Own time* is a step without its backward pass and without collectives, in which ranks wait for
    each other (see `gpuprobe.analysis.ranks.compare`).
    """

    rank: int
    steps: int
    step_ns: int | None
    own_ns: int | None
    device: str
    peak: int | None
    reserved: int | None
    at_end: int | None
    state: str


def rank_facts(rank: RankRecording, *, running: bool) -> RankFacts:
    """The figures of a rank. ``running``: whether its process may still be recording."""
    steps = rank.steps
    recent = full_steps(steps[-RECENT:]) if steps else []
    device, peak, reserved = _peaks(steps)
    end: int | Unavailable = Unavailable("no step")
    if steps:
        window = next((w for w in steps[-1].windows if w.device == device), None)
        end = window.end.allocated if window else steps[-1].host.rss_end
    state = "running" if running else "incomplete" if missing_of(rank) else "complete"
    if rank.end is not None and rank.end.error is not None:
        state = f"failed: {rank.end.error.type}"
    return RankFacts(
        rank=rank.session.rank,
        steps=sum(step.ended_by != "end" for step in steps),
        step_ns=round(median(step.duration_ns for step in recent)) if recent else None,
        own_ns=_own_time(recent),
        device=device,
        peak=peak,
        reserved=reserved,
        at_end=None if isinstance(end, Unavailable) else end,
        state=state,
    )


def _own_time(steps: list[Step]) -> int | None:
    shares = time_shares(steps)
    if shares is None or not shares.steps:
        return None
    backward = sum(phase.ns for phase in shares.phases if phase.path == "backward")
    waiting = shares.collectives_ns if not backward else 0
    return max(0, shares.duration_ns - backward - waiting) // shares.steps


def _peaks(steps: Sequence[Step]) -> tuple[str, int | None, int | None]:
    """The device with the highest peak, that peak, and the highest reserved memory."""
    device, peak, reserved = "", None, None
    for step in steps:
        for window in step.windows:
            high = window.peak_allocated
            if isinstance(high, Peak) and (peak is None or high.at_least > peak):
                device, peak = window.device, high.at_least
            held = window.peak_reserved
            if isinstance(held, Peak) and (reserved is None or held.at_least > reserved):
                reserved = held.at_least
    if peak is None:
        known = [s.host.rss_peak.at_least for s in steps if isinstance(s.host.rss_peak, Peak)]
        peak = max(known, default=None)
    return device, peak, reserved
