"""The ranks of a run side by side, as lines of text. Knows nothing of Textual."""

from __future__ import annotations

from statistics import median

from gpuprobe.analysis.time_shares import full_steps, time_shares
from gpuprobe.api.live import is_running
from gpuprobe.model.run.recording import RankRecording, Recording
from gpuprobe.model.run.session import Step
from gpuprobe.model.text import human_bytes, human_ns, visible
from gpuprobe.model.values import Peak, Unavailable

__all__ = ["rank_facts", "rank_rows"]

_HEAD = (
    f"{'rank':>5} {'steps':>7} {'step time':>10} {'own time':>10} {'peak':>11} {'reserved':>11} "
    f"{'at end':>11}  state"
)

_RECENT = 50


def rank_rows(recording: Recording) -> tuple[str, list[str]]:
    """The header, and a line per rank; what stands out is marked with ``◂``.

    *Own time* is a step less its backward pass and less the collectives outside it: ranks wait
    for each other there (see `gpuprobe.analysis.ranks`).
    """
    facts = [_facts(rank) for rank in recording.ranks]
    peaks = [peak for _, peak, _ in facts if peak is not None]
    owns = [own for own, _, _ in facts if own is not None]
    worst = max(peaks) if len(peaks) > 1 and max(peaks) > 1.02 * median(peaks) else None
    slowest = max(owns) if len(owns) > 1 and max(owns) > 1.1 * median(owns) else None
    rows = []
    for own, peak, row in facts:
        marks = []
        if worst is not None and peak == worst:
            marks.append("highest peak")
        if slowest is not None and own == slowest:
            marks.append("slowest")
        rows.append(row + (f"  ◂ {', '.join(marks)}" if marks else ""))
    return _HEAD, rows


def rank_facts(rank: RankRecording) -> dict[str, int | str | None]:
    """What a line is made of: durations in ns, sizes in bytes, None where not known."""
    steps = rank.steps
    recent = full_steps(steps[-_RECENT:]) if steps else []
    device, peak, reserved = _peaks(steps)
    end: int | Unavailable = Unavailable("no step")
    if steps:
        window = next((w for w in steps[-1].windows if w.device == device), None)
        end = window.end.allocated if window else steps[-1].host.rss_end
    state = "running" if is_running(rank) else "killed" if rank.end is None else "complete"
    if rank.end is not None and rank.end.error is not None:
        state = f"failed: {rank.end.error.type}"
    return {
        "rank": rank.session.rank,
        "steps": sum(step.ended_by != "end" for step in steps),
        "step_ns": round(median(step.duration_ns for step in recent)) if recent else None,
        "own_ns": _own_time(recent),
        "device": device,
        "peak": peak,
        "reserved": reserved,
        "at_end": None if isinstance(end, Unavailable) else end,
        "state": state,
    }


def _facts(rank: RankRecording) -> tuple[int | None, int | None, str]:
    """(own time in ns, peak in bytes, the line) of a rank; None where it is not known."""
    facts = rank_facts(rank)
    own, peak = facts["own_ns"], facts["peak"]
    line = (
        f"{facts['rank']:>5} {facts['steps']:>7} {_ns(facts['step_ns']):>10} {_ns(own):>10} "
        f"{_bytes(peak):>11} {_bytes(facts['reserved']):>11} {_bytes(facts['at_end']):>11}  "
        f"{facts['state']}"
    )
    return (
        own if isinstance(own, int) else None,
        peak if isinstance(peak, int) else None,
        visible(line),
    )


def _own_time(steps: list[Step]) -> int | None:
    shares = time_shares(steps)
    if shares is None or not shares.steps:
        return None
    backward = sum(phase.ns for phase in shares.phases if phase.path == "backward")
    waiting = shares.collectives_ns if not backward else 0
    return max(0, shares.duration_ns - backward - waiting) // shares.steps


def _peaks(steps: tuple[Step, ...]) -> tuple[str, int | None, int | None]:
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


def _ns(value: int | str | None) -> str:
    return human_ns(value) if isinstance(value, int) else "-"


def _bytes(value: int | str | None) -> str:
    return human_bytes(value) if isinstance(value, int) else "-"
