"""Pinned memory of the host that torch's allocator holds and the program has not requested."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from gpuprobe.model.causes import Certainty, Effect, MemoryCause
from gpuprobe.model.place import NoPlace, Place, parse_place
from gpuprobe.model.report import PinnedMemory
from gpuprobe.model.text import human_bytes
from gpuprobe.model.values import Unavailable

_LEAST: Final = 1 / 3
"""The share of what is held. Of requests of any size, rounding to powers of two adds a quarter."""
_LEAST_BYTES: Final = 32 << 20
_LINES: Final = 10
"""As many lines as a recording has: of more, what was requested is unknown."""
_NOT_TRIED: Final = Unavailable("what the host would hold then depends on the sizes")


def diagnose(
    pinned: PinnedMemory | None, variable: Callable[[Place], str] = lambda place: ""
) -> Iterator[MemoryCause]:
    """The pinned memory that is held in addition to the most that was requested at one time, if a
    line of the program requested most of that. ``variable``: the name that code at a place assigns.
    """
    if pinned is None or isinstance(pinned.held, Unavailable):
        return
    if not 0 < len(pinned.lines) < _LINES:
        return
    requested = sum(line.bytes for line in pinned.lines)
    more, place = pinned.held - requested, parse_place(pinned.lines[0].place)
    if more < max(_LEAST_BYTES, _LEAST * pinned.held) or not _is_a_line(place):
        return
    name = variable(place) if isinstance(place, Place) else ""
    yield MemoryCause(
        rule="pinned-rounding",
        bytes=more,
        blocks=sum(line.tensors for line in pinned.lines),
        made_at=place,
        last_use=None,
        holder=None,
        kept_at=None,
        sentence=f"the host holds {human_bytes(pinned.held)} of pinned memory, of which at most "
        f"{human_bytes(requested)} were requested at one time, the most at {place}"
        f"{f' for {name}' if name else ''}: torch rounds each request up to a power of two, and "
        "keeps what is freed",
        remedy="request one pinned block, of a power of two or a little less, and split it; reuse "
        "the pinned buffer (copy_ into it, when the copies from it are done) instead of a new one "
        "each time; or use unpinned memory where no copy has to be asynchronous",
        code="",
        effect=Effect(Certainty.UNTRIED, pinned.held, _NOT_TRIED),
    )


def _is_a_line(place: Place | NoPlace) -> bool:
    """Not the thread of a DataLoader, of which the program does not choose the sizes."""
    return isinstance(place, Place) and bool(place.file) and bool(place.line)
