"""Telling what activation checkpointing recomputes from the rest of the backward pass.

``torch.utils.checkpoint`` has two ways to run a module's forward again: the saved-tensor hooks
of ``use_reentrant=False`` (a `_recomputation_hook` is entered around it), and the backward of an
autograd function with ``use_reentrant=True``, which then starts a backward pass inside the
backward pass. Both are Python, so both can be reported as a phase of the name ``recompute``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch.utils import checkpoint

from gpuprobe.patching import patch

RECOMPUTE = "recompute"
"""The phase, inside ``backward``, in which a checkpointed forward is run again."""


class _Phases(Protocol):
    def begin(self, phase: str) -> None: ...
    def end(self, phase: str) -> None: ...


Restore = Callable[[], None]


def watch(listener: _Phases) -> list[Restore]:
    """Report recomputation to ``listener``; returns what puts torch back as it was.

    A torch without these (private) names is left alone: then recomputation is part of the
    backward phase.
    """
    restore: list[Restore] = []
    hook = getattr(checkpoint, "_recomputation_hook", None)
    if hook is not None:
        restore += _watch_hook(listener, hook)
    function = getattr(checkpoint, "CheckpointFunction", None)
    if function is not None:
        restore.append(_watch_function(listener, function))
    return restore


def in_engine() -> bool:
    """Whether this thread is running a backward pass: the one that started it, or one of the
    threads that the autograd engine has for each device.
    """
    return bool(torch._C._current_graph_task_id() != -1)


def _watch_hook(listener: _Phases, hook: Any) -> list[Restore]:
    enter, leave = hook.__enter__, hook.__exit__

    @functools.wraps(enter)
    def entered(self: Any) -> Any:
        if torch.compiler.is_compiling():
            return enter(self)
        listener.begin(RECOMPUTE)
        try:
            return enter(self)
        except BaseException:
            listener.end(RECOMPUTE)
            raise

    @functools.wraps(leave)
    def left(self: Any, *error: Any) -> Any:
        if torch.compiler.is_compiling():
            return leave(self, *error)
        try:
            return leave(self, *error)
        finally:
            listener.end(RECOMPUTE)

    return [patch(hook, "__enter__", entered), patch(hook, "__exit__", left)]


def _watch_function(listener: _Phases, function: Any) -> Restore:
    original = function.backward

    @functools.wraps(original)
    def backward(ctx: Any, *gradients: Any) -> Any:
        if torch.compiler.is_compiling():
            return original(ctx, *gradients)
        listener.begin(RECOMPUTE)
        try:
            return original(ctx, *gradients)
        finally:
            listener.end(RECOMPUTE)

    return patch(function, "backward", staticmethod(backward))
