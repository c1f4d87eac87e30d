"""Processes that a recorded program started and that used a GPU."""

from __future__ import annotations

from typing import Annotated

from gpuprobe.model.bounds import MOST_DEVICES, AtMost, Count, Rank
from gpuprobe.model.record import record
from gpuprobe.model.run.session import Environment, ProgramError, Session, SessionEnd
from gpuprobe.model.values import Peak, Unavailable


@record(frozen=True, slots=True)
class ChildPeak:
    """The most that a process had on one device."""

    device: str
    allocated: Peak | Unavailable
    reserved: Peak | Unavailable


@record(frozen=True, slots=True)
class ChildProcess:
    """Such a process. ``name`` is its recording, a directory inside the program's, ``rank`` that of
    the program; ``steps`` counts whole steps; ``end`` is None if it still runs or was killed.
    """

    name: str
    rank: Rank
    session: Session
    environment: Environment
    steps: Count
    peaks: Annotated[tuple[ChildPeak, ...], AtMost(MOST_DEVICES)]
    end: SessionEnd | None


@record(frozen=True)
class ChildRow:
    """A process that the program started and that used a GPU; not one of the ranks. ``name`` is its
    recording, a directory inside this one, ``rank`` that of the program.
    """

    name: str
    rank: int
    pid: int
    status: str
    error: ProgramError | None
    steps: int
    duration_ns: int | Unavailable
    peaks: tuple[ChildPeak, ...]
