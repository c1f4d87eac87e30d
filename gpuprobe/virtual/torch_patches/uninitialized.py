"""Parameters of lazy modules, which let only listed methods be called before they have a shape."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.parameter

from gpuprobe.patching import Patches
from gpuprobe.virtual.machine import Machine


def install(machine: Machine, patches: Patches) -> None:
    """List what replaces a listed method, too: torch knows them by their identity. After all
    methods were replaced.
    """
    mixin: Any = torch.nn.parameter.UninitializedTensorMixin
    listed = mixin._allowed_methods
    named = [getattr(torch.Tensor, getattr(method, "__name__", ""), None) for method in listed]
    replaced = [new for new, old in zip(named, listed, strict=True) if new not in (None, old)]
    patches.set(mixin, "_allowed_methods", [*listed, *replaced])
    if machine.shapes:
        for kind in (torch.nn.parameter.UninitializedParameter,
                     torch.nn.parameter.UninitializedBuffer):  # fmt: skip
            patches.set(kind, "__new__", staticmethod(_without_values(kind)))


def _without_values(kind: Any) -> Any:
    """Host tensors of at most one element have values where nothing else has. What is to become
    a weight may not: torch does not make the one kind of tensor into the other.
    """
    original = kind.__new__

    def new(cls: Any, requires_grad: bool = kind.__new__.__defaults__[0], *args: Any,
            **options: Any) -> Any:  # fmt: skip
        made = original(cls, requires_grad, *args, **options)
        if made.is_cuda:
            return made
        with torch._C.DisableTorchFunctionSubclass():
            data = torch.empty(2, dtype=made.dtype)[:0]
        result = torch.Tensor._make_subclass(cls, data, requires_grad)
        vars(result).update(vars(made))  # what a buffer has of its own
        return result

    return new
