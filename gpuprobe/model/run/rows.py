"""The steps of all ranks, as a report lists them."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import overload

from gpuprobe.model.run.session import Step


@dataclass(frozen=True, slots=True)
class StepRow:
    """A step of a rank, as it was recorded."""

    rank: int
    step: Step

    @property
    def outside_phases_ns(self) -> int:
        """Of the phases of depth one; 0 where they cover the step."""
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
