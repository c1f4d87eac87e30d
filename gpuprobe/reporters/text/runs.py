"""The runs being recorded on this machine, a line each."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import PurePath
from typing import IO, TYPE_CHECKING

from gpuprobe.model.text import human_bytes, human_ns, visible
from gpuprobe.model.values import Peak, Unavailable

if TYPE_CHECKING:
    from gpuprobe.model.run.totals import Run

HEAD = (
    f"{'recording':<26} {'pid':>7} {'step':>8} {'step time':>10} {'peak':>11} {'for':>7}  "
    "level    program"
)


def line(run: Run, now: float | None = None) -> str:
    """One run. ``now``: seconds since the Unix epoch."""
    name = visible(PurePath(run.path).name)
    start = f"{name:<26.26} {min(run.pids):>7}"
    summary = run.summary
    if summary is None:
        return f"{start} (no training step yet)"
    if isinstance(summary, Unavailable):
        return f"{start} {visible(summary.reason)}"
    step, session = summary.step, summary.session
    age = (time.time() if now is None else now) - session.started_at
    peak = _peak(run.peak)
    program = visible(" ".join(session.argv))
    if summary.ranks > 1:
        program = f"{summary.ranks} ranks · {program}"
    if summary.gap is not None:
        program = f"{visible(summary.gap.text)} · {program}"
    return (
        f"{start} {step.index if step else '-':>8} "
        f"{human_ns(step.duration_ns) if step else '-':>10} {peak:>11} {_age(age):>7}  "
        f"{session.level:<8} {program}"
    )


def _peak(peak: Peak | None) -> str:
    if peak is None:
        return "-"
    return ("" if peak.exact else "≥") + human_bytes(peak.at_least)


def _age(seconds: float) -> str:
    minutes = max(0, int(seconds)) // 60
    if minutes < 60:
        return f"{minutes} min"
    hours = minutes // 60
    return f"{hours} h" if hours < 48 else f"{hours // 24} d"


def write(runs: Sequence[Run], stream: IO[str]) -> None:
    """Write the list as text."""
    if not runs:
        stream.write("no run is being recorded on this machine\n")
        return
    stream.write(HEAD + "\n")
    for run in runs:
        stream.write(line(run) + "\n")
