"""A rank of a run that is being recorded, in a few figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from gpuprobe.analysis.time_shares import full_steps, time_shares
from gpuprobe.model.run.recording import RankRecording
from gpuprobe.model.run.session import Step
from gpuprobe.model.values import Peak, Unavailable

RECENT = 50
"""Steps that the pace is taken from: the newest."""


@dataclass(frozen=True, slots=True)
class RankFacts:
    """Durations in ns, sizes in bytes; None where not known.

    *Own time* is a step less its backward pass and less the collectives outside it: ranks wait
    for each other there (see `gpuprobe.analysis.ranks.compare`).
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
    """``running``: whether its process may still be writing."""
    steps = rank.steps
    recent = full_steps(steps[-RECENT:]) if steps else []
    device, peak, reserved = _peaks(steps)
    end: int | Unavailable = Unavailable("no step")
    if steps:
        window = next((w for w in steps[-1].windows if w.device == device), None)
        end = window.end.allocated if window else steps[-1].host.rss_end
    state = "running" if running else "killed" if rank.end is None else "complete"
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
    """The device with the highest peak, that peak, and the highest reserved one."""
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
