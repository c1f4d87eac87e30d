"""Finding the program's models without being told: the module trees that are alive."""

from __future__ import annotations

import gc
import sys
from types import FunctionType
from typing import Any

import torch

__all__ = ["compile_in_use", "live_roots", "live_tensors"]


def live_roots() -> list[Any]:
    """Every `torch.nn.Module` that no other live module contains, and that has parameters.

    Looks through the objects the garbage collector tracks: some tens of milliseconds, once.
    ``type(o)`` and not ``isinstance``: a lazy proxy must not be woken up by being looked at.
    Loss functions and other modules without parameters are left out.
    """
    module_class = torch.nn.Module
    modules = [o for o in gc.get_objects() if issubclass(type(o), module_class)]
    contained: set[int] = set()
    for module in modules:
        children = module.__dict__.get("_modules")
        if children:  # a module whose __init__ has not run yet has none
            contained.update(id(child) for child in children.values() if child is not None)
    return [
        module
        for module in modules
        if id(module) not in contained
        and "_parameters" in module.__dict__
        # What torch.jit made of a module refuses hooks, and its parts are no Python.
        and not isinstance(module, torch.jit.ScriptModule)
        and next(module.parameters(), None) is not None
    ]


def live_tensors() -> list[Any]:
    """Every tensor that has a Python object now.

    Not those that ``torch.func`` hands to a function: they have no storage but another's.
    """
    tensor_class = torch.Tensor
    is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor
    return [o for o in gc.get_objects() if issubclass(type(o), tensor_class) and not is_wrapped(o)]


def compile_in_use() -> bool:
    """Whether ``torch.compile`` was asked for before now: a compiled frame, module or function.

    Dynamo marks what it wraps with ``_torchdynamo_orig_callable``; functions it was told to
    leave alone carry ``_torchdynamo_disable`` as well.
    """
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is None:
        return False
    if dynamo.utils.counters["frames"]:
        return True
    for found in gc.get_objects():
        if type(found) is FunctionType:
            marks = found.__dict__
            if "_torchdynamo_orig_callable" in marks and not marks.get("_torchdynamo_disable"):
                return True
        elif issubclass(type(found), torch.nn.Module) and (
            type(found).__name__ == "OptimizedModule"
            or found.__dict__.get("_compiled_call_impl") is not None
        ):
            return True
    return False
