"""Ending a program after some optimizer steps."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpuprobe.sampler.program import Program


class Enough(BaseException):
    """Ends a program after the steps that were asked for. Not an Exception: programs that catch
    those must not go on.
    """


@contextmanager
def limit(steps: int) -> Iterator[Callable[[], int]]:
    """Raise `Enough` once every optimizer, or one of them once more, has made ``steps``."""
    most, remove = _count(steps, Enough)
    try:
        yield most
    finally:
        remove()


def exit_after(steps: int, told: Callable[[], object]) -> None:
    """End this process, which a program started, as ``sys.exit(0)`` does, after these steps.
    ``told`` is called before.
    """

    def end() -> BaseException:
        told()
        return SystemExit(0)

    _count(steps, end)


def _count(
    steps: int, end: Callable[[], BaseException]
) -> tuple[Callable[[], int], Callable[[], None]]:
    """Raise ``end()`` after these steps, in this process. The most of an optimizer, and what stops
    counting.
    """
    from torch.optim.optimizer import register_optimizer_step_post_hook

    counts: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
    most = 0
    process = os.getpid()

    def stepped(optimizer: Any, args: Any, kwargs: Any) -> None:
        nonlocal most
        if os.getpid() != process:
            return
        counts[optimizer] = counts.get(optimizer, 0) + 1
        most = max(most, counts[optimizer])
        if min(counts.values()) >= steps or max(counts.values()) > steps:
            raise end()

    return lambda: most, register_optimizer_step_post_hook(stepped).remove


class Limited:
    """A program that ends well after ``steps`` optimizer steps.

    torch is imported before the program starts. The limit's hook is the last to be registered,
    so that a recorder still sees the end of the last step.
    """

    def __init__(self, program: Program, steps: int) -> None:
        self._program = program
        self._steps = steps
        self.argv = program.argv

    def run(self) -> None:
        with limit(self._steps), suppress(Enough):
            self._program.run()
