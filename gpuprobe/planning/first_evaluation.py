"""The first evaluation of a program, which follows the training steps of an estimate.

Most programs evaluate after an epoch, and an estimate makes a few steps. So its epoch ends after
them: the iterators of the DataLoaders that gave its batches have no more, and the program continues
up to

* its next training step (a backward pass after the batches of another iterator),
* a file that it would change, which would be one of an epoch that was not trained,
* an error, or its end.

A program whose batches come from elsewhere is stopped at once.
"""

from __future__ import annotations

import os
import stat
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import torch
from torch.utils.data.dataloader import _BaseDataLoaderIter

from gpuprobe import kept_files
from gpuprobe.errors import GpuprobeError, UnknownValue, ValueNeeded
from gpuprobe.file_changes import changes_of, is_programs_doing, wrap_torch_writer
from gpuprobe.model.plans.estimate import MAY_NEED_MORE
from gpuprobe.patching import Patches
from gpuprobe.planning.processes import Stalled
from gpuprobe.planning.program import described
from gpuprobe.sampler.hooks.optimizer_steps import Enough
from gpuprobe.torch_support.callers import place_in

_AHEAD: Final = 2
"""Training steps that may follow: Accelerate and Lightning read a batch ahead of the program."""

_LEAST_BATCHES: Final = 4
"""After these, an iterator ends where memory has not grown for two batches."""

_MOST_BATCHES: Final = 256
"""Of each iterator, and calls of models in all: what grows with each batch would grow further."""

_TRAINS: Final = "the next training step"

_HERE: Final = (__name__, kept_files.__name__)
"""Modules of gpuprobe through which a change is reported."""


class FirstEvaluation:
    """Ends the epoch of the program in this process, and the program after what follows."""

    def __init__(self) -> None:
        self.on_stop: Callable[[], None] = lambda: None
        """Called before the program is stopped, while its functions still have what they have."""
        self._patches = Patches()
        self._over = False  # the program has ended
        self._process = os.getpid()
        self._thread = threading.get_ident()
        self._trained: weakref.WeakSet[Any] = weakref.WeakSet()  # iterators that gave batches
        self._exhausted: weakref.WeakSet[Any] = weakref.WeakSet()  # of them, since the epoch ended
        self._later: weakref.WeakKeyDictionary[Any, list[int]] = weakref.WeakKeyDictionary()
        self._batches = 0  # of other iterators, since the epoch ended
        self._calls = 0  # of models, since then
        self._steps = 0  # of optimizers, since then
        self._evaluated = False
        self._cut = 0  # batches after which an iterator was ended
        self._grows = False  # whether memory still grew then
        self.began = False
        """Whether the epoch was ended."""
        self.ended = ""
        """Why the program was stopped after that."""

    # -- what the estimate calls

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Inside, the program's DataLoaders are known, and end their epoch after `begin`."""
        following = _BaseDataLoaderIter.__next__

        def next_batch(iterator: Any) -> Any:
            return self._next(iterator, following)

        self._patches.set(_BaseDataLoaderIter, "__next__", next_batch)
        try:
            yield
        finally:
            self._over = True
            self._patches.undo()

    def begin(self) -> bool:
        """End the epoch. False if no DataLoader gave its batches: it cannot be ended."""
        if not self._trained:
            return False
        self.began = True
        backward = torch.autograd._engine_run_backward

        def run_backward(*args: Any, **named: Any) -> Any:
            if self._batches:
                self._stop(_TRAINS)
            return backward(*args, **named)

        self._patches.set(torch.autograd, "_engine_run_backward", run_backward)
        self._patches.add(wrap_torch_writer(self._changes))
        _watch_files(self)
        return True

    def step(self) -> None:
        """An optimizer made a step after the epoch had ended. Raises Enough if it is one more than
        what was read ahead.
        """
        self._steps += 1
        if self._batches or self._steps > _AHEAD:
            self._stop(_TRAINS)

    def phase(self, path: str) -> None:
        """The program is in this phase. Raises Enough after many calls of models."""
        if not self.began or self._over or path not in ("forward", "evaluation"):
            return
        self._evaluated = self._evaluated or path == "evaluation"
        self._calls += 1
        if self._calls > _MOST_BATCHES:
            self._stop(f"{_MOST_BATCHES} calls of models were made")

    def ended_by(self, error: BaseException) -> bool:
        """Whether an exception that ended the program only ended what followed the epoch. Those of
        gpuprobe and interrupts do not.
        """
        if not self.began or not isinstance(error, (Exception, Enough, SystemExit, UnknownValue)):
            return False
        if isinstance(error, GpuprobeError) and not isinstance(error, ValueNeeded):
            return False
        self.ended = self.ended or _end_of_evaluation(error)
        return True

    @property
    def complete(self) -> bool:
        """Whether all was run that comes before the next training step."""
        return self.began and self.ended in ("", _TRAINS)

    def assumption(self, steps: int, option: str = "") -> str:
        """What was run after the ``steps`` of training. ``option``: the one that sets them."""
        what = "an evaluation that follows" if self._evaluated else "what follows"
        by = f" ({option})" if option else ""
        text = f"the epoch was ended after step {steps}{by}, and {what} it was run"
        if self._cut:
            grows = "where memory grew with each" if self._grows else "where memory did not grow"
            text += f", with {self._cut} batches of its DataLoader, {grows}"
        if self.ended:
            text += f", until {self.ended}: later code {MAY_NEED_MORE}"
        return text

    # -- what the program does

    def _next(self, iterator: Any, following: Callable[[Any], Any]) -> Any:
        if os.getpid() != self._process or threading.get_ident() != self._thread:
            return following(iterator)
        if not self.began:
            self._trained.add(iterator)
        elif iterator in self._trained:
            if iterator in self._exhausted:  # with persistent workers it is that of the next epoch
                self._stop(_TRAINS)
            self._exhausted.add(iterator)
            raise StopIteration
        elif self._is_enough(iterator):
            raise StopIteration
        batch = following(iterator)
        self._batches += self.began
        return batch

    def _is_enough(self, iterator: Any) -> bool:
        """Whether this iterator, begun after the epoch, has given enough batches."""
        held = self._later.setdefault(iterator, [])
        held.append(sum(map(torch.cuda.memory_allocated, range(torch.cuda.device_count()))))
        given = len(held) - 1
        if given < _LEAST_BATCHES:
            return False
        settled = held[-1] <= held[-2] <= held[-3]
        if not settled and given < _MOST_BATCHES:
            return False
        self._cut, self._grows = given, not settled
        return True

    def event(self, event: str, arguments: Sequence[Any]) -> None:
        """An audit event of Python."""
        if self._over:
            return
        with suppress(TypeError, ValueError):  # a descriptor, or an invalid argument
            for path, _ in changes_of(event, arguments):
                if event != "os.mkdir" or not Path(path).is_dir():
                    self._changes(os.fsdecode(path))

    def _changes(self, path: str) -> None:
        """A file is about to be changed. Raises Enough if it is one of the program's."""
        if not self._over and self._is_own_doing() and not _is_special(path):
            self._stop(f"it would change {os.path.relpath(path)}")

    def _is_own_doing(self) -> bool:
        """Whether the program itself, in this process, is what runs now."""
        if os.getpid() != self._process:
            return False
        return is_programs_doing(_HERE, otherwise=False)

    def _stop(self, why: str) -> None:
        if not self.ended:
            self.ended = why
            self.on_stop()
        raise Enough


def _end_of_evaluation(error: BaseException) -> str:
    """Why the program ended after its training, as a sentence about it."""
    if isinstance(error, Stalled):
        return "it waited for a process that had been stopped"
    if isinstance(error, SystemExit):
        return "" if error.code in (None, 0) else f"it ended with exit code {error.code}"
    if isinstance(error, (ValueNeeded, UnknownValue)):
        return "it needed a value that was not computed"
    if isinstance(error, StopIteration):
        return f"it took another batch of the epoch at {place_in(error)}"
    assert isinstance(error, Exception)  # an Enough has its reason
    return f"it failed at {place_in(error)} ({described(error)})"


def _watch_files(evaluation: FirstEvaluation) -> None:
    """Report audit events to it while it exists: a hook of Python's stays to the process's end."""
    ref = weakref.ref(evaluation)

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        found = ref()
        if found is not None:
            found.event(event, arguments)

    sys.addaudithook(hook)


def _is_special(path: str) -> bool:
    """Whether it is a device, a pipe or a socket, which keep nothing."""
    try:
        mode = Path(path).stat().st_mode
    except OSError:
        return False
    return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))
