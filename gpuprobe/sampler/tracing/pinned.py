"""The pinned host memory that a program requests, by line.

torch's statistics have what its allocator of pinned memory holds: each request is rounded up to a
power of two (``at::HostBlockPool``, ``CachingHostAllocator.h``). What was requested, and where, is
known from the operators that make pinned tensors.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, Final

import torch

from gpuprobe.model.place import SourceLine
from gpuprobe.model.run.session import PinnedLine
from gpuprobe.model.values import Bytes

_MOST_LINES: Final = 10
_MAKES: Final = frozenset(("_pin_memory", "pin_memory"))


def pins(name: str, kwargs: dict[str, Any]) -> bool:
    """Whether an operator makes pinned memory."""
    return name in _MAKES or bool(kwargs and kwargs.get("pin_memory"))


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

        if isinstance(result, torch.Tensor) and result.device.type == "cpu":
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
            PinnedLine(str(self._places(place)), Bytes(size), counts[place])
            for place, size in sizes.most_common(_MOST_LINES)
        )

    @property
    def lines(self) -> tuple[PinnedLine, ...]:
        """The lines at the moment when the most was requested, the largest first."""
        return self._lines
