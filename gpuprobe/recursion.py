"""The recursion depth of a thread, without gpuprobe's frames.

Python counts the calls of each thread, and raises RecursionError at a limit that a program may read
and set. The frames of gpuprobe below a program, and those of a hook above it, are calls, too: here
they are taken out of the count, which a thread's state in CPython contains. `sys.getrecursionlimit`
does not change, nor do the limits of other threads.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Callable
from typing import Any, Final

_SEARCHED: Final = 256
"""Bytes at the beginning of a thread's state (``PyThreadState``) that contain the count."""

_INT: Final = ctypes.sizeof(ctypes.c_int)


class CallCount:
    """The count of calls of the current thread. Versions of CPython store the calls that are left
    (3.11 and later: ``recursion_remaining``) or those that are active (``recursion_depth``).
    """

    def __init__(self, count: ctypes.c_int, sign: int) -> None:
        self._count = count
        self._sign = sign  # -1: what is left

    def forget(self, calls: int) -> None:
        """Subtract this many calls from the count; a negative number adds calls."""
        self._count.value -= self._sign * calls

    def names(self) -> dict[str, Any]:
        """The names that `READS` needs; it sets ``active``, the calls that are active in it."""
        limit = sys.getrecursionlimit() if self._sign < 0 else 0
        return {"count": self._count, "limit": limit, "sign": self._sign}


_ROOM: Final = 200
"""Calls that a hook may make beyond the limit of recursion."""

_main: CallCount | None = None


def with_room(run: Callable[..., Any], *args: Any, **named: Any) -> Any:
    """Call a function of gpuprobe, such as a hook, with `_ROOM` calls more than the limit of
    recursion leaves: it works also where the program has nearly reached the limit. Only in the main
    thread, after `call_count` was called there.
    """
    if _main is None or threading.get_ident() != _MAIN:
        return run(*args, **named)
    _main.forget(_ROOM)
    try:
        return run(*args, **named)
    finally:
        _main.forget(-_ROOM)


def count_here() -> CallCount | None:
    """The count of this thread, if it is the main thread and `call_count` has been called there."""
    return _main if threading.get_ident() == _MAIN else None


_MAIN: Final = threading.main_thread().ident

READS: Final = compile("active = limit + sign * count.value", "<gpuprobe>", "exec")
"""Run by `exec` in the frame that will run a program."""


_NESTED: Final = (1, 4, 9)
"""Depths of calls at which the state is read, to find what counts them."""


def _snapshot(address: int, calls: int) -> bytes:
    if calls:
        return _snapshot(address, calls - 1)
    return ctypes.string_at(address, _SEARCHED)


def call_count() -> CallCount | None:
    """The count of this thread; None if it is not where CPython has it."""
    if sys.implementation.name != "cpython":
        return None
    state = ctypes.PYFUNCTYPE(ctypes.c_void_p)(("PyThreadState_Get", ctypes.pythonapi))()
    numbers = ctypes.c_int * (_SEARCHED // _INT)
    samples = [numbers.from_buffer_copy(_snapshot(state, calls)) for calls in _NESTED]
    limit = sys.getrecursionlimit()
    places = []
    for index, first in enumerate(samples[0]):
        for sign in (-1, 1):
            expected = [first + sign * (calls - _NESTED[0]) for calls in _NESTED]
            if expected != [sample[index] for sample in samples]:
                continue
            if sign > 0 or samples[0][index + 1] == limit:
                places.append((index, sign))
    if len(places) != 1:
        return None
    index, sign = places[0]
    found = CallCount(ctypes.c_int.from_address(state + index * _INT), sign)
    if threading.get_ident() == _MAIN:
        global _main
        _main = found
    return found
