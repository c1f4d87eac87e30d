"""The pinned host memory that a program requests, by line.

torch's statistics have what its allocator of pinned memory holds: each request is rounded up to a
power of two (``at::HostBlockPool``, ``CachingHostAllocator.h``). What was requested, and where, is
known from the operators that make pinned tensors.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from types import FrameType
from typing import Any, Final

import torch

from gpuprobe.model.place import SourceLine
from gpuprobe.model.run.session import PinnedLine
from gpuprobe.model.values import Bytes

_MOST_LINES: Final = 10
_MAKES: Final = frozenset(("_pin_memory", "pin_memory"))
_LOADER: Final = -1
_LOADER_TEXT: Final = "(the pin_memory thread of a DataLoader)"
_LOADER_LOOP: Final = "_pin_memory_loop"
"""The function of that thread, in torch/utils/data/_utils/pin_memory.py."""


def pins(name: str, kwargs: dict[str, Any]) -> bool:
    """Whether an operator makes pinned memory. A copy that nothing waits for does, to the CPU."""
    if name in _MAKES or not kwargs:
        return name in _MAKES
    return bool(kwargs.get("pin_memory") or (name == "_to_copy" and kwargs.get("non_blocking")))


class PinnedTensors:
    """The pinned tensors of one recording. ``places`` returns the line of a numbered place."""

    def __init__(self, places: Callable[[int], SourceLine]) -> None:
        self._places = places
        # Weak references to storages, which do not keep their memory: bytes, place.
        self._alive: dict[int, tuple[Any, int, int]] = {}
        self._most = 0
        self._lines: tuple[PinnedLine, ...] = ()

    def made(self, result: object, place: int) -> None:
        """An operator at a place has made this."""
        from torch.multiprocessing.reductions import StorageWeakRef

        if isinstance(result, torch.Tensor) and result.device.type == "cpu" and result.is_pinned():
            if _in_loader():
                place = _LOADER
            storage = result.untyped_storage()
            self._alive[storage._cdata] = StorageWeakRef(storage), storage.nbytes(), place
            self._count()

    def _count(self) -> None:
        """Note the most that was requested at one time."""
        self._alive = {key: one for key, one in self._alive.items() if not one[0].expired()}
        asked = sum(size for _, size, _ in self._alive.values())
        if asked <= self._most:
            return
        self._most = asked
        sizes: Counter[int] = Counter()
        counts: Counter[int] = Counter()
        for _, size, place in self._alive.values():
            sizes[place] += size
            counts[place] += 1
        self._lines = tuple(
            PinnedLine(self._text(place), Bytes(size), counts[place])
            for place, size in sizes.most_common(_MOST_LINES)
        )

    def _text(self, place: int) -> str:
        return _LOADER_TEXT if place == _LOADER else str(self._places(place))

    @property
    def lines(self) -> tuple[PinnedLine, ...]:
        """The lines at the moment when the most was requested, the largest first."""
        return self._lines


def _in_loader() -> bool:
    """Whether this thread copies the batches of a DataLoader into pinned memory."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == _LOADER_LOOP:
            return True
        frame = frame.f_back
    return False
