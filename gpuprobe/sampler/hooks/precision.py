"""The number formats that a program trains in: of its parameters, and of autocast."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from gpuprobe.patching import patch
from gpuprobe.sampler.environment import gpu_names


class PrecisionWatch:
    """Records formats from `start` to `stop`. `text` describes them; "" if there were none.

    Parameters are read once per optimizer, at its first step.
    """

    def __init__(self) -> None:
        self._parameters: Counter[str] = Counter()
        self._autocast: set[str] = set()
        self._undo: list[Callable[[], None]] = []
        self._known: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()

    def start(self) -> None:
        handle = register_optimizer_step_pre_hook(self._stepping)
        self._undo.append(handle.remove)
        owner = torch.amp.autocast_mode.autocast
        enter = owner.__enter__

        def entering(context: torch.amp.autocast) -> object:
            result = enter(context)
            self._entered(context)
            return result

        self._undo.append(patch(owner, "__enter__", entering))

    def stop(self) -> None:
        while self._undo:
            self._undo.pop()()

    def _entered(self, context: torch.amp.autocast) -> None:
        if getattr(context, "_enabled", False):
            self._autocast.add(_name(getattr(context, "fast_dtype", "?")))

    def _stepping(self, optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        if optimizer in self._known:
            return
        self._known.add(optimizer)
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                self._parameters[_name(parameter.dtype)] += parameter.nbytes

    def devices(self) -> str:
        """The names of the GPUs that the program could use; "" if it used none."""
        return ", ".join(sorted(set(gpu_names())))

    def text(self) -> str:
        parts = [f"{' and '.join(sorted(self._parameters))} parameters"] if self._parameters else []
        if self._autocast:
            parts.append(f"autocast to {' and '.join(sorted(self._autocast))}")
        elif parts:
            parts.append("no autocast")
        return ", ".join(parts)


def _name(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")
