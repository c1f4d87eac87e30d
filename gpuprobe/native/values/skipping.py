"""Copies of the runtime inside operators whose values are computed on the CPU.

See ``gpuprobe/native/runtime/computed.c``. The functions concern the calling thread.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Final

SKIP_DEVICE: Final = 1
"""Copies within device memory, and fills, do nothing: what they would copy was not computed."""
SKIP_TO_DEVICE: Final = 2
SKIP_TO_HOST: Final = 4
FEED_HOST: Final = 8
"""Copies to the host find the answers that were given, in order, or zeros that are counted."""

INSIDE: Final = SKIP_DEVICE | SKIP_TO_DEVICE | FEED_HOST
"""Within an operator that is computed as a whole."""
BETWEEN: Final = SKIP_DEVICE
"""Within one whose parts are computed one by one: what it reads is computed already."""
COPYING: Final = SKIP_DEVICE | SKIP_TO_DEVICE | SKIP_TO_HOST
"""Within a copy that is made elsewhere."""


class Skipping:
    """The runtime's functions. They take a fraction of a microsecond, so the interpreter's lock is
    kept.
    """

    def __init__(self, core: Path) -> None:
        library = ctypes.PyDLL(str(core))
        self.set: Callable[[int], int] = library.gpn_computed_mode
        """Sets this thread's mode and returns the one before."""
        self.unknown_reads: Callable[[], int] = library.gpn_computed_unknown_reads
        library.gpn_computed_unknown_reads.restype = ctypes.c_ulonglong
        self.shared_known: Callable[[int, int], int] = library.gpn_shared_known
        """Whether the values of the shared storage at an address are computed: 0 or 1; -1 if that
        is noted nowhere. The second argument sets it, -1 does not."""
        library.gpn_shared_known.argtypes = (ctypes.c_void_p, ctypes.c_int)
        self._answer = library.gpn_computed_answer
        self._answer.argtypes = (ctypes.c_char_p, ctypes.c_size_t)
        self._answer.restype = ctypes.c_size_t

    def answer(self, value: int, size: int, signed: bool = True) -> bool:
        """What the next copy of ``size`` bytes to the host finds. False if too many wait."""
        return bool(self._answer(value.to_bytes(size, "little", signed=signed), size))

    def forget(self) -> None:
        """Forget the answers that no copy has taken."""
        self._answer(b"", 0)
