"""A recording in memory: what every report, screen and check reads."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Annotated, Protocol, overload

from gpuprobe.model.findings import Finding
from gpuprobe.model.record import record
from gpuprobe.model.run.columns import StepColumns, columns_of
from gpuprobe.model.run.session import (
    BlindSpot,
    Environment,
    Gap,
    HeldRows,
    ProgramError,
    Session,
    SessionEnd,
    Step,
)
from gpuprobe.model.text import plural
from gpuprobe.model.trace import MemoryTrace
from gpuprobe.model.values import (
    MOST_DEVICES,
    AtMost,
    Count,
    Displayed,
    OneOf,
    Peak,
    Rank,
    Unavailable,
)


@dataclass(frozen=True, slots=True)
class StepRow:
    """A step of a rank, as it was recorded."""

    rank: int
    step: Step

    @property
    def outside_phases_ns(self) -> int:
        """Nanoseconds outside of the phases of depth one; 0 if they cover the step."""
        outer = (phase.duration_ns for phase in self.step.phases if "/" not in phase.path)
        return self.step.duration_ns - sum(outer)


class StepRows(Sequence[StepRow]):
    """Every step of every rank, in order of ranks and of steps. A row is made when it is used, as
    the steps of a large recording are."""

    def __init__(self, ranks: Sequence[tuple[int, Sequence[Step]]] = ()) -> None:
        """``ranks``: the number of each rank, and its steps in order of their index."""
        self._ranks = ranks
        self._ends = list(accumulate(len(steps) for _, steps in ranks))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    @overload
    def __getitem__(self, row: int) -> StepRow: ...
    @overload
    def __getitem__(self, row: slice) -> tuple[StepRow, ...]: ...
    def __getitem__(self, row: int | slice) -> StepRow | tuple[StepRow, ...]:
        if isinstance(row, slice):
            return tuple(self[at] for at in range(*row.indices(len(self))))
        at = row + len(self) if row < 0 else row
        if not 0 <= at < len(self):
            raise IndexError("row out of range")
        place = bisect_right(self._ends, at)
        rank, steps = self._ranks[place]
        return StepRow(rank, steps[at - (self._ends[place] - len(steps))])

    def __iter__(self) -> Iterator[StepRow]:
        return (StepRow(rank, step) for rank, steps in self._ranks for step in steps)

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, StepRows)
            and len(self) == len(other)
            and all(one == two for one, two in zip(self, other, strict=True))
        )

    __hash__ = None  # type: ignore[assignment]

    def positions(self, rank: int, index: int) -> list[int]:
        """Where the steps of this rank with this index are: one, or none."""
        found = []
        start = 0
        for (number, steps), end in zip(self._ranks, self._ends, strict=True):
            if number == rank:
                at = bisect_left(steps, index, key=lambda step: step.index)
                if at < len(steps) and steps[at].index == index:
                    found.append(start + at)
            start = end
        return found

    def last_of(self, rank: int) -> StepRow | None:
        """The last step of a rank; None if it has none."""
        found = [steps[-1] for number, steps in self._ranks if number == rank and len(steps)]
        return StepRow(rank, found[-1]) if found else None


@record(frozen=True, slots=True)
class ChildPeak:
    """The most that a process had on one device."""

    device: str
    allocated: Peak | Unavailable
    reserved: Peak | Unavailable


@record(frozen=True, slots=True)
class ChildProcess:
    """Such a process. ``name`` is its recording, a directory inside the program's, ``rank`` that of
    the program; ``steps`` counts whole steps; ``end`` is None if it has none (yet); ``gap`` is what
    could not be written.
    """

    name: str
    rank: Rank
    session: Session
    environment: Environment
    steps: Count
    peaks: Annotated[tuple[ChildPeak, ...], AtMost(MOST_DEVICES)]
    end: SessionEnd | None
    gap: Gap | None = None


Status = Annotated[str, OneOf(("complete", "failed", "running", "incomplete", "unfinished"))]
"""How a program ended. ``incomplete``: its process does not run, and the recording has no end, or
records could not be written. ``unfinished``: it has no end, and whether the process runs is unknown
(it ran on another machine)."""


@record(frozen=True)
class ChildRow:
    """A process that the program started and that used a GPU; not one of the ranks. ``name`` is its
    recording, a directory inside this one, ``rank`` that of the program.
    """

    name: str
    rank: int
    pid: int
    status: Status
    error: ProgramError | None
    steps: int
    duration_ns: int | Unavailable
    peaks: tuple[ChildPeak, ...]


SCHEMA = "gpuprobe.recording"
"""The schema in the first line of every rank's stream."""

SCHEMA_VERSION = (2, 13)
"""(major, minor). A newer major is refused; a newer minor only adds keys."""


class TraceReader(Protocol):
    """The traces of one rank, one for each step and device, in the order of their steps."""

    unreadable: dict[int, str]
    """By step, why its traces could not be read."""

    def __iter__(self) -> Iterator[MemoryTrace]: ...

    def of(self, step: Step) -> Iterator[MemoryTrace]:
        """The traces of one step. Raises DataError where one is missing or damaged."""

    def steps(self, steps: Sequence[Step]) -> list[Step]:
        """Those that may have traces."""


class LoadedTraces:
    """Traces in memory, as of a snapshot: ``read`` returns all."""

    def __init__(self, read: Callable[[], Iterable[MemoryTrace]]) -> None:
        self._read = read
        self.unreadable: dict[int, str] = {}

    def __iter__(self) -> Iterator[MemoryTrace]:
        return iter(self._read())

    def of(self, step: Step) -> Iterator[MemoryTrace]:
        """Those with the step's index."""
        return (trace for trace in self._read() if trace.step == step.index)

    def steps(self, steps: Sequence[Step]) -> list[Step]:
        """All: which of them have traces is known by reading these."""
        return list(steps)


@dataclass(slots=True)
class RankRecording:
    """What one process (one rank) recorded.

    The ``steps`` of a large recording are decoded when they are used (`columns` has the figures
    of all). ``gap`` is what could not be written, ``damaged`` the number of lines that are not
    records; ``end`` is None as long as the process runs, or if it wrote none. ``traces`` are
    read when they are used.
    """

    session: Session
    environment: Environment
    steps: Sequence[Step] = ()
    findings: tuple[Finding, ...] = ()
    blind_spots: tuple[BlindSpot, ...] = ()
    gap: Gap | None = None
    damaged: int = 0
    end: SessionEnd | None = None
    traces: TraceReader = field(default_factory=lambda: LoadedTraces(tuple), compare=False)
    held: Mapping[str, Sequence[HeldRows]] = field(default_factory=dict)
    """What held memory that later steps did not use, by the name of the trace."""
    truncated: bool = False  # the last line has no end: the writer is writing, or did not finish
    _columns: StepColumns | None = field(default=None, init=False, repr=False, compare=False)

    @property
    def columns(self) -> StepColumns:
        """The figures of all steps; those of a large recording were read as columns."""
        found = self._columns
        if found is None:
            found = columns_of(self.steps) or StepColumns.of(self.steps)
            self._columns = found
        return found

    def traced_steps(self) -> list[Step]:
        """The steps that may have traces; of a large recording no others are decoded."""
        return self.traces.steps(self.steps)


@dataclass(slots=True)
class Recording(Displayed):
    """A recording, or a torch memory snapshot read as one.

    A snapshot has one rank, no steps, and one trace per device.
    """

    path: str
    schema_version: tuple[int, int]
    ranks: tuple[RankRecording, ...]
    kind: str = "recording"  # or "snapshot"
    load_children: Callable[[], tuple[ChildProcess, ...]] = field(default=tuple, repr=False)
    """Reads what processes recorded that the program started and that used a GPU, without those
    that are ranks of a job."""

    def __repr__(self) -> str:
        ranks = "" if len(self.ranks) == 1 else f", {len(self.ranks)} ranks"
        steps = f", {plural(len(self.steps), 'step')}" if self.steps else ""
        return f"<{self.kind} {self.path}{ranks}{steps}>"

    @property
    def steps(self) -> Sequence[Step]:
        """The steps of the first rank."""
        return self.ranks[0].steps if self.ranks else ()
