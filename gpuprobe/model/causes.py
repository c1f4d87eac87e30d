"""Why memory at a peak is not needed, what holds it, and what changes without it."""

from __future__ import annotations

from enum import Enum
from typing import Final

from gpuprobe.model.needs import NeedTable
from gpuprobe.model.place import NoPlace, Place
from gpuprobe.model.record import record
from gpuprobe.model.run.holders import Holder
from gpuprobe.model.values import Unavailable

EDIT_TRIED: Final = "an edit was tried"
"""How the note of an `Effect` begins whose figure is a replay's though a changed program was run.
"""


class Certainty(str, Enum):
    """How the effect of a remedy is known."""

    TRIED = "tried"  # the changed program was run, as far as the unchanged one
    REPLAYED = "replayed"  # the trace was replayed with earlier frees
    UNTRIED = "untried"


class Bound(str, Enum):
    """What is known of the memory of a changed program, by a figure."""

    EXACT = "exact"  # as far as it does what a replay assumes
    OR_MORE = "or_more"  # something else may keep memory, or has to be allocated
    OR_LESS = "or_less"  # other memory may be smaller as well


@record(frozen=True)
class Effect:
    """The most memory with and without a change, in bytes: allocated, or ``reserved``. ``assumed``:
    what a replay assumes of the changed program; ``bound``: whether that needs ``after``, or
    possibly more or less; ``patch``: the change, for ``git apply``; ``note``: why it was not tried,
    or what is different about the tried run.
    """

    certainty: Certainty
    before: int
    after: int | Unavailable
    assumed: str = ""
    reserved: bool = False
    patch: str = ""
    note: str = ""
    bound: Bound = Bound.EXACT


@record(frozen=True)
class Suggestion:
    """One thing to try. ``bytes`` is the memory it is about (not a promise to save it all);
    ``saves``: what it saves, replayed; "" if it was not tried.
    """

    id: str
    text: str
    code: str
    evidence: str
    bytes: int
    saves: str = ""


@record(frozen=True)
class MemoryCause:
    """Memory at the peak that the program does not need, or less of, all for one reason. ``rule``
    names the rule that found it; ``made_at`` is the line that allocated the most, ``last_use`` the
    line that used that last, ``kept_at`` the line that stores what holds it, or where it becomes
    larger than it must be.
    """

    rule: str
    bytes: int
    blocks: int
    made_at: Place | NoPlace
    last_use: Place | NoPlace | None
    holder: Holder | None
    kept_at: Place | None
    sentence: str
    remedy: str
    code: str
    effect: Effect


class RunEnd(str, Enum):
    """How the recorded run of a program ended."""

    COMPLETE = "complete"
    OUT_OF_MEMORY = "out of memory"
    STOPPED = "stopped"  # by gpuprobe, when its time was over
    EPOCH = "epoch"  # by gpuprobe, after some steps of its first epoch and the evaluation after


@record(frozen=True)
class Explanation:
    """What the memory of a program is for. ``capacity``: the GPU's, in bytes; ``detail``: the
    message of its error, or when it or its epoch was ended; ``failed``: the memory is that at the
    failure, not at a peak; ``late_variable``: which variable keeps the most of what is freed later
    than it could be, with the bytes; ``smaller``: without a cause, what makes needed memory
    smaller; ``ranks``: what the other ranks of a job have, a line each; ``notes``: what was not
    checked, and why; ``searched``: whether everything was that can be.
    """

    program: str
    gpu: str
    device: str
    step: int | None
    phase: str
    capacity: int
    allocated: int
    reserved: int | Unavailable
    ended: RunEnd
    detail: str
    failed: bool
    needs: NeedTable
    late_variable: str
    causes: tuple[MemoryCause, ...]
    smaller: Suggestion | None
    notes: tuple[str, ...]
    searched: bool
    seconds: float
    ranks: tuple[str, ...] = ()
