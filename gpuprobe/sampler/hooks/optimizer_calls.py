"""Which optimizers are in the middle of a step, and which of their steps makes a training step."""

from __future__ import annotations

import sys
import threading
import weakref
from types import CodeType, FrameType
from typing import Any, NamedTuple


class _Call(NamedTuple):
    """A call of ``optimizer.step``: where its frame is, counted from the bottom of its thread."""

    thread: int
    depth: int
    code: CodeType


class OptimizerCalls:
    """The calls of ``optimizer.step`` that are under way, one inside another.

    torch calls no hook where one raises (out of memory in the first step, a closure that gives
    up), and a program may well go on. So a call counts while its frame is on the stack.
    """

    def __init__(self) -> None:
        self._calls: list[_Call] = []

    def __len__(self) -> int:
        return len(self._calls)

    def begin(self, caller: FrameType) -> None:
        """A call begins; ``caller`` is its frame."""
        depth = len(_stack(caller))
        self._calls.append(_Call(threading.get_ident(), depth, caller.f_code))

    def end(self) -> None:
        """The innermost call returned."""
        if self._calls:
            self._calls.pop()

    def forget_raised(self) -> bool:
        """Forget the calls that an exception ended. Whether that leaves none of them."""
        if not self._calls:
            return False
        stack = _stack(sys._getframe(1))
        while self._calls:
            thread, depth, code = self._calls[-1]
            if thread != threading.get_ident():  # the engine's thread, working for that one
                return False
            if depth <= len(stack) and stack[-depth] is code:
                return False
            self._calls.pop()
        return True


def _stack(frame: FrameType | None) -> list[CodeType]:
    """What runs in this frame and those below it."""
    found = []
    while frame is not None:
        found.append(frame.f_code)
        frame = frame.f_back
    return found


class StepOwner:
    """Tells whether an optimizer's step begins a new training step, or belongs to the one that
    ended last: that of a second optimizer (a generator's after a discriminator's) does.
    """

    def __init__(self) -> None:
        self._primary: weakref.ref[Any] | None = None
        self._stepped: weakref.WeakSet[Any] = weakref.WeakSet()

    @property
    def known(self) -> bool:
        return self._primary is not None

    def amends(self, optimizer: Any, *, last: bool) -> bool:
        """This optimizer stepped. ``last``: there is a step that it could belong to."""
        primary = None if self._primary is None else self._primary()
        if primary is None:  # the first one, or one that takes the place of one that is gone
            primary = optimizer
            self._primary = weakref.ref(optimizer)
        if last and optimizer is not primary and optimizer not in self._stepped:
            self._stepped.add(optimizer)
            return True
        self._stepped = weakref.WeakSet([optimizer])
        return False
