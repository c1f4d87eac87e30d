"""What a list of runs shows of each."""

from __future__ import annotations

from dataclasses import field

from gpuprobe.model.record import record
from gpuprobe.model.run.session import Environment, Session, SessionEnd, Step
from gpuprobe.model.values import Unavailable


@record(frozen=True, slots=True)
class RunSummary:
    """Of a recording's first rank, the session and the newest step.

    ``step`` is None where there is none yet. ``ranks`` counts the streams in the directory.
    """

    path: str
    ranks: int
    session: Session
    environment: Environment
    step: Step | None = field(default=None)
    end: SessionEnd | None = field(default=None)


@record(frozen=True, slots=True)
class Run:
    """A recording that is being written. ``pids``: the processes that write it (and children of
    theirs). ``seen``: its session and newest step, None before the session begins.
    """

    path: str
    pids: tuple[int, ...]
    seen: RunSummary | Unavailable | None
