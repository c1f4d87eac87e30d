"""What the memory at one instant is needed for: the state of each block between its birth and its
death, from the operators that used it.

Profilers of functional languages call these states *lag*, *use*, *drag* and *void* (Röjemo and
Runciman, "Lag, drag, void and use", ICFP 1996).
"""

from __future__ import annotations

from enum import Enum
from typing import Annotated, Final

from gpuprobe.model.memory import Category
from gpuprobe.model.place import NoPlace, Place
from gpuprobe.model.record import record
from gpuprobe.model.text import human_bytes
from gpuprobe.model.values import OneOf


class Need(str, Enum):
    """Why a block is alive at an instant."""

    IN_USE = "in_use"  # the operator that runs uses it, or has just made it
    LATER = "needed_later"  # used before, or being computed, and used again
    NOT_YET = "not_used_yet"  # its first use is still to come
    NEVER_AGAIN = "never_used_again"  # used before, and never again
    NEVER = "never_used"  # no operator uses it, from its birth to its death
    OPEN = "open"  # used in the last step that was traced, and alive when it ended
    UNTRACED = "not_traced"  # no operator made or used it: a library's, or older

    @property
    def label(self) -> str:
        """The name that reports show."""
        return _LABELS[self]

    @property
    def short(self) -> str:
        """The name in a legend."""
        return _SHORT.get(self, self.label)

    @property
    def needless(self) -> bool:
        """Whether the program would compute the same without this memory from here on."""
        return self in (Need.NEVER_AGAIN, Need.NEVER)


_LABELS = {
    Need.IN_USE: "in use now",
    Need.LATER: "needed later",
    Need.NOT_YET: "not used yet",
    Need.NEVER_AGAIN: "never used again",
    Need.NEVER: "never used",
    Need.OPEN: "kept when the recording ends",
    Need.UNTRACED: "not traced: made by a library",
}

_SHORT = {Need.OPEN: "kept at the end", Need.UNTRACED: "not traced"}


def use_in_words(operator: str, place: str, phase: str) -> str:
    """A use of memory: the operator, the line that called it, and its phase. In a backward pass the
    line is that of the forward operator.
    """
    by = operator or "an operator"
    if place and phase.rpartition("/")[2] == "backward":
        return f"the backward pass of {place} ({by})"
    return f"{by}{f' at {place}' if place else ''}{f' ({phase})' if phase else ''}"


NeedName = Annotated[str, OneOf(tuple(need.value for need in Need))]


@record(frozen=True)
class NeedLine:
    """The blocks in one state that one line of the program made. ``last_use`` is the line of their
    last use in the traced step, ``by`` the operator, ``phase`` its phase; "" and None where they
    have no use in it.
    """

    key: Place | NoPlace
    bytes: int
    blocks: int
    category: str
    last_use: Place | NoPlace | None
    by: str
    phase: str
    later_step: bool = False


@record(frozen=True)
class NeedModule:
    """The blocks in one state that a module made; ``key`` is its name, with ``*`` for the numbers
    of layers that repeat, or why there is none.
    """

    key: str
    bytes: int
    blocks: int


@record(frozen=True)
class NeedRow:
    """The blocks in one state: those of some lines, and ``more`` bytes of others; the same blocks
    by module, and ``more_modules`` bytes of other modules.
    """

    need: NeedName
    bytes: int
    blocks: int
    lines: tuple[NeedLine, ...]
    more: int
    modules: tuple[NeedModule, ...] = ()
    more_modules: int = 0


_SMALL_WORKSPACE: Final = 8 * 16 * 1024
"""Bytes of one of ``:16:8``, the smaller of the two settings that NVIDIA documents for cuBLAS
(https://docs.nvidia.com/cuda/cublas/#results-reproducibility), which "may limit overall
performance"."""


@record(frozen=True)
class NeedTable:
    """The memory at the high water mark of step ``step`` by `Need`; the rows sum to ``total``.
    ``freed_after_use`` would be the high water mark of the trace if each block that is never used
    again were freed after its last use, and those that are never used were not allocated.
    """

    step: int | None
    total: int
    rows: tuple[NeedRow, ...]
    freed_after_use: int

    def bytes_of(self, *needs: Need) -> int:
        """The bytes of some states."""
        return sum(row.bytes for row in self.rows if Need(row.need) in needs)

    @property
    def smaller(self) -> str:
        """What takes less memory, if the program needs everything."""
        lines = [line for row in self.rows for line in row.lines]
        scratch = [line for line in lines if line.category == Category.WORKSPACE]
        saved = sum(line.bytes - line.blocks * _SMALL_WORKSPACE for line in scratch)
        if 2 * saved > self.total:
            return (
                "smaller workspaces of cuBLAS: CUBLAS_WORKSPACE_CONFIG=:16:8 makes each "
                f"{human_bytes(_SMALL_WORKSPACE)}, {human_bytes(saved)} less in all (not tried; "
                "matrix products may take longer)"
            )
        return "smaller work, fewer bytes for each value, or recomputation"


@record(frozen=True)
class Lifespan:
    """Blocks of which the trace has the begin and the end, only one of them, or none. The shortest
    and the longest life in it, in nanoseconds: where begin or end are missing, the block lives
    longer.
    """

    begins_in_trace: bool
    ends_in_trace: bool
    bytes: int
    blocks: int
    shortest_ns: int
    longest_ns: int


@record(frozen=True)
class LifespanTable:
    """The memory at the high water mark by how much of its life a trace without uses has; the rows
    sum to ``total``. ``timed``: whether its events have times.
    """

    total: int
    rows: tuple[Lifespan, ...]
    timed: bool


@record(frozen=True)
class UsesCost:
    """What noting the uses of memory has cost: for so many operators, the host's time for each in
    nanoseconds.
    """

    operators: int
    each_ns: int
