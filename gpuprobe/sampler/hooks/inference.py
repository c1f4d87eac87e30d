"""Steps of a program that only infers: each call of a model's ``generate``, and each outermost call
of a model in ``inference_mode``.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import CodeType, FrameType, FunctionType
from typing import Any

import torch

from gpuprobe.patching import patch
from gpuprobe.sampler.hooks.discover import is_trained
from gpuprobe.sampler.hooks.wrapping import in_context


class InferenceSteps:
    """Which calls of models end a step. Where an optimizer is alive that trains the first one, none
    does: they belong to an evaluation before training, between its steps or after it.

    ``ended`` is called when a call of ``generate`` has ended that was a step.
    """

    def __init__(self, ended: Callable[[], None]) -> None:
        self._ended = ended
        self._open = 0  # calls of models inside one another
        self._trains: bool | None = None  # not looked yet: it takes some ten milliseconds
        self._generating = 0  # calls of generate inside one another
        self._called = False  # a model, to infer, since the outermost of them began
        self._codes: set[CodeType] = set()  # of the functions that were replaced
        self._missed = False  # a call of generate began before it was replaced
        self._restore: list[Callable[[], None]] = []
        self._thread = threading.get_ident()

    def begins(self) -> None:
        self._open += 1
        if self._missed and self._open == 1 and not self._in_replaced():
            self._missed = False
            self._ended()  # the call that was in progress has returned meanwhile

    def ends(self) -> None:
        self._open -= 1

    def trains(self) -> None:
        """An optimizer is at work: no call ends a step from here on."""
        self._trains = True

    def infers(self) -> bool:
        """Whether a model is called to infer: nothing of it is kept for a backward pass."""
        return not torch.is_grad_enabled()

    def ends_step(self, model: torch.nn.Module) -> bool:
        """Whether the call of ``model`` that has just ended was a step."""
        if self._open > 0 or torch.is_grad_enabled() or self._trained(model):
            return False
        if self._generating:
            self._called = True
            return False
        if self._codes and self._in_replaced():
            self._missed = True
            return False
        return torch.is_inference_mode_enabled()

    def _trained(self, model: torch.nn.Module) -> bool:
        if self._trains is None:
            self._trains = is_trained(model)
        return self._trains

    # -- generate

    def watch(self, models: Iterable[Any]) -> None:
        """Report each call of the ``generate`` method that a class of these models has."""
        for model in models:
            for owner in type(model).__mro__:
                found = vars(owner).get("generate")
                if not isinstance(found, FunctionType):
                    continue
                if found.__code__ not in self._codes and not hasattr(found, _MARK):
                    self._replace(owner, found)
                break

    def _replace(self, owner: type, function: FunctionType) -> None:
        inner: Any = function
        while inner is not None:  # decorators, such as torch.no_grad()
            if isinstance(inner, FunctionType):
                self._codes.add(inner.__code__)
            inner = getattr(inner, "__wrapped__", None)
        watched = in_context(function, self._generate)
        setattr(watched, _MARK, True)
        self._restore.append(patch(owner, "generate", watched))

    @contextmanager
    def _generate(self) -> Iterator[None]:
        if threading.get_ident() != self._thread:
            yield
            return
        if self._missed:
            self._missed = False
            self._ended()
        self._generating += 1
        try:
            yield
        finally:
            self._generating -= 1
            if self._generating == 0 and self._called and not self._trains:
                self._called = False
                self._ended()

    def _in_replaced(self) -> bool:
        """Whether a function that was replaced is running: one that began before."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            if frame.f_code in self._codes:
                return True
            frame = frame.f_back
        return False

    def remove(self) -> None:
        """Put every ``generate`` back."""
        while self._restore:
            self._restore.pop()()


_MARK = "_gpuprobe_generate"
