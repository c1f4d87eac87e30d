"""Steps of optimizers: which are in progress, which one ends a training step, how many a program
may make.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from os import getpid
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from gpuprobe.patching import patch

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from gpuprobe.sampler.program import Program


class _Call(NamedTuple):
    """A call of ``optimizer.step``, and the depth of its frame, counted from the bottom of its
    thread.
    """

    thread: int
    depth: int
    code: CodeType


class OptimizerCalls:
    """The calls of ``optimizer.step`` in progress, one inside another.

    If one raises (out of memory in the first step, a closure that gives up), torch calls no hook,
    and a program may well continue. So a call counts while its frame is on the stack.
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
        """Forget the calls that an exception ended. True if that leaves none in progress."""
        if not self._calls:
            return False
        stack = _stack(sys._getframe(1))
        while self._calls:
            thread, depth, code = self._calls[-1]
            if thread != threading.get_ident():  # a thread of the engine, which that one waits for
                return False
            if depth <= len(stack) and stack[-depth] is code:
                return False
            self._calls.pop()
        return True


def _stack(frame: FrameType | None) -> list[CodeType]:
    """The code of this frame and of those below it."""
    found = []
    while frame is not None:
        found.append(frame.f_code)
        frame = frame.f_back
    return found


class StepOwner:
    """Decides whether an optimizer's step begins a new training step or belongs to the last one, as
    the step of a second optimizer does (a generator's after a discriminator's).
    """

    def __init__(self) -> None:
        self._primary: weakref.ref[Optimizer] | None = None
        self._stepped: weakref.WeakSet[Optimizer] = weakref.WeakSet()

    @property
    def known(self) -> bool:
        return self._primary is not None

    def amends(self, optimizer: Optimizer, *, last: bool) -> bool:
        """Whether the step of ``optimizer`` belongs to the last training step, if there is one
        (``last``).
        """
        primary = None if self._primary is None else self._primary()
        if primary is None:  # the first one, or one that replaces one that no longer exists
            primary = optimizer
            self._primary = weakref.ref(optimizer)
        if last and optimizer is not primary and optimizer not in self._stepped:
            self._stepped.add(optimizer)
            return True
        self._stepped = weakref.WeakSet([optimizer])
        return False


class Enough(BaseException):
    """Ends a program after the requested steps. Not an Exception: programs that catch those must
    not continue.
    """


@contextmanager
def limit(
    steps: Callable[[], int], end: Callable[[], BaseException | None] = Enough
) -> Iterator[Callable[[], int]]:
    """Raise ``end()`` once every optimizer has made ``steps()``, or one of them one more; as long
    as it returns None, the program continues, and it is called after each further step.
    """
    most, remove = _count(steps, end)
    try:
        yield most
    finally:
        remove()


_GRADIENTS_FOR_A_STEP: Final = 4
"""Calls of `torch.autograd.grad` that count as a step, of a program without a backward pass."""


@contextmanager
def limit_without_optimizer(
    steps: Callable[[], int], end: Callable[[], BaseException | None]
) -> Iterator[Callable[[], int]]:
    """Raise ``end()`` as a backward pass begins after ``steps()`` others, if the program has made
    no optimizer: it changes its parameters itself, as with ``p.data.add_(p.grad, alpha=-lr)``. As
    long as it returns None, the program continues. The function that is entered returns the passes.
    """
    from torch import autograd

    passes = gradients = 0
    optimizes = False
    process = getpid()
    following = autograd._engine_run_backward

    def run_backward(*args: Any, **named: Any) -> Any:
        nonlocal passes, gradients, optimizes
        optimizes = optimizes or made_optimizer()
        if getpid() == process and not optimizes:
            enough = passes >= steps() or gradients >= _GRADIENTS_FOR_A_STEP * steps()
            if enough:
                _raise_end(end)
            passes += bool(named.get("accumulate_grad"))
            gradients += not named.get("accumulate_grad")
        return following(*args, **named)

    restore = patch(autograd, "_engine_run_backward", run_backward)
    try:
        yield lambda: passes or gradients // _GRADIENTS_FOR_A_STEP
    finally:
        restore()


def made_optimizer() -> bool:
    """Whether this process has made an optimizer: torch marks the method of a class then."""
    from torch.optim import Optimizer

    kinds: list[type] = [Optimizer]
    for kind in kinds:
        kinds += kind.__subclasses__()
    return any(getattr(vars(kind).get("step"), "hooked", False) for kind in kinds)


def exit_after(steps: int, on_end: Callable[[], object]) -> None:
    """End this process, which a program started, as ``sys.exit(0)`` does, after these steps.
    ``on_end`` is called before.
    """

    def end() -> BaseException:
        on_end()
        return SystemExit(0)

    _count(lambda: steps, end)


def _count(
    steps: Callable[[], int], end: Callable[[], BaseException | None]
) -> tuple[Callable[[], int], Callable[[], None]]:
    """`limit`, in this process. Returns a function for the largest number of steps of an optimizer,
    and one that stops counting.
    """
    from torch.optim.optimizer import register_optimizer_step_post_hook

    counts: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
    most = 0
    process = getpid()

    def stepped(optimizer: Optimizer, args: object, kwargs: object) -> None:
        nonlocal most
        if getpid() != process:
            return
        counts[optimizer] = counts.get(optimizer, 0) + 1
        most = max(most, counts[optimizer])
        if min(counts.values()) >= steps() or max(counts.values()) > steps():
            _raise_end(end)

    return lambda: most, register_optimizer_step_post_hook(stepped).remove


def _raise_end(end: Callable[[], BaseException | None]) -> None:
    """Raise what ``end`` returns, if anything.

    The variable is deleted: a frame that refers to an exception which has passed through it is a
    reference cycle, and would keep all variables of the program until the garbage collector runs.
    """
    error = end()
    try:
        if error is not None:
            raise error
    finally:
        del error


class Limited:
    """A program that ends normally after ``steps`` optimizer steps.

    torch is imported before the program starts. The limit's hook is the last to be registered, so
    that a recorder still gets the end of the last step.
    """

    def __init__(self, program: Program, steps: int) -> None:
        self._program = program
        self._steps = steps
        self.argv = program.argv

    def run(self) -> None:
        with limit(lambda: self._steps), suppress(Enough):
            self._program.run()
