"""Steps of a program that only runs inference: each call of a model's ``generate``, and each
outermost call of a model in ``inference_mode``.
"""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import CodeType, FrameType, FunctionType

import torch

from gpuprobe.patching import patch
from gpuprobe.sampler.hooks.discover import is_trained
from gpuprobe.sampler.hooks.wrapping import in_context


class InferenceSteps:
    """Decides which calls of models end a step. If an optimizer is alive that trains the first one,
    none does: they belong to an evaluation before, between or after training steps.

    ``ended`` is called when a call of ``generate`` has ended that was a step.
    """

    def __init__(self, ended: Callable[[], None]) -> None:
        self._ended = ended
        self._open = 0  # calls of models inside one another
        self._trains: bool | None = (
            None  # None: not checked yet, which takes about ten milliseconds
        )
        self._generating = 0  # calls of generate inside one another
        self._called = False  # a model was called since the outermost of them began
        self._codes: set[CodeType] = set()  # of the functions that were replaced
        self._missed = False  # a call of generate began before it was replaced
        self._restore: list[Callable[[], None]] = []
        self._thread = threading.get_ident()
        self._calls: dict[int, int] = {}  # of each module, by id, since generate began
        self.mixed = False
        """``generate`` calls several models again and again: one drafts, one verifies."""

    def begins(self) -> None:
        self._open += 1
        if self._missed and self._open == 1 and not self._in_replaced():
            self._missed = False
            self._ended()  # the call that was in progress has returned meanwhile

    def ends(self) -> None:
        self._open -= 1

    @property
    def nested(self) -> bool:
        """Whether a model is called by another one."""
        return self._open > 1

    def trains(self) -> None:
        """An optimizer is used: no call ends a step from here on."""
        self._trains = True

    def infers(self) -> bool:
        """Whether models are called for inference: nothing is kept for a backward pass."""
        return not torch.is_grad_enabled()

    def decodes(self, module: torch.nn.Module) -> bool:
        """Whether the outermost call of a module, which begins, decodes one token of each sequence:
        in ``generate``, each but its first call of the model, the prefill.

        A prompt that is prefilled in chunks (``prefill_chunk_size``) is a prefill and tokens.
        """
        if torch.is_grad_enabled() or not self.in_generate():
            self._calls.clear()
            self.mixed = False
            return False
        calls = self._calls
        calls[id(module)] = calls.get(id(module), 0) + 1
        self.mixed = sum(number > 1 for number in calls.values()) > 1
        return calls[id(module)] > 1

    def in_generate(self) -> bool:
        """Whether a call of ``generate`` is in progress in this thread."""
        return bool(self._codes) and self._in_replaced()

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

    def watch(self, models: Iterable[torch.nn.Module]) -> None:
        """Report each call of the ``generate`` method of these models' classes."""
        for model in models:
            for owner in type(model).__mro__:
                found = vars(owner).get("generate")
                if not isinstance(found, FunctionType):
                    continue
                if not hasattr(found, _MARK):
                    self._replace(owner, found)
                break

    def _replace(self, owner: type, function: FunctionType) -> None:
        # Without its decorators: all functions under torch.no_grad() run the code of one wrapper.
        inner = inspect.unwrap(function)
        if isinstance(inner, FunctionType):
            self._codes.add(inner.__code__)
        recorded = in_context(function, self._generate)
        setattr(recorded, _MARK, True)
        self._restore.append(patch(owner, "generate", recorded))

    @contextmanager
    def _generate(self) -> Iterator[None]:
        if threading.get_ident() != self._thread:
            yield
            return
        if self._missed:
            self._missed = False
            self._ended()
        if not self._generating:
            self._calls.clear()
        self._generating += 1
        try:
            yield
        finally:
            self._generating -= 1
            if self._generating == 0 and self._called and not self._trains:
                self._called = False
                self._ended()

    def _in_replaced(self) -> bool:
        """Whether a function that was replaced is running: the call began before that."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            if frame.f_code in self._codes:
                return True
            frame = frame.f_back
        return False

    def remove(self) -> None:
        """Restore every ``generate``."""
        while self._restore:
            self._restore.pop()()


_MARK = "_gpuprobe_generate"
