"""Why memory at a peak is not needed, what holds it, and what changes without it."""

from __future__ import annotations

from enum import Enum

from gpuprobe.model.needs import NeedTable
from gpuprobe.model.place import NoPlace, Place
from gpuprobe.model.record import record
from gpuprobe.model.run.holders import Holder
from gpuprobe.model.values import Unavailable


class Certainty(str, Enum):
    """How the effect of a remedy is known."""

    TRIED = "tried"  # the changed program ran to its end
    REPLAYED = "replayed"  # the trace was replayed with earlier frees
    UNTRIED = "untried"


@record(frozen=True)
class Effect:
    """The most allocated memory with and without a change, in bytes. ``patch``: the change, for
    ``git apply``; ``note``: why it was not tried, or what is different about the tried run.
    """

    certainty: Certainty
    before: int
    after: int | Unavailable
    patch: str = ""
    note: str = ""


@record(frozen=True)
class MemoryCause:
    """Memory at the peak that the program does not need, all for one reason. ``rule`` names the
    rule that found it; ``made_at`` is the line that allocated the most, ``last_use`` the line that
    used that last, ``kept_at`` the line that stores what holds it.
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


@record(frozen=True)
class Explanation:
    """What the memory of a program is for. ``capacity``: the GPU's, in bytes; ``ended``: how the
    program ended; ``notes``: what was not looked at, and why.
    """

    program: str
    gpu: str
    device: str
    step: int | None
    phase: str
    capacity: int
    allocated: int
    reserved: int | Unavailable
    ended: str
    needs: NeedTable
    causes: tuple[MemoryCause, ...]
    notes: tuple[str, ...]
    seconds: float
