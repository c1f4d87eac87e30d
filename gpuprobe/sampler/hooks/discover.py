"""Finding the program's models without being told: the module trees that are alive."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from itertools import chain, compress, repeat
from operator import is_, methodcaller
from types import FunctionType
from typing import Any

import torch

from gpuprobe.model.io.files import gc_paused
from gpuprobe.sampler.tracing.tensors import modules_of


def _tracked(test: Callable[[Any, Any], bool], kind: Any) -> list[Any]:
    """The objects the garbage collector tracks for whose type ``test(type, kind)`` is true.

    A list of all objects must not live while another thread runs. A tuple that ``tuple(iterator)``
    is still filling would be in it, and Python refuses to finish a tuple that somebody else holds:
    the thread would get a SystemError. So the list is filled, walked and emptied inside one call
    of C code, which keeps the interpreter to itself: no step of it is Python code (``test`` must
    be none either), and no collection runs meanwhile.
    """
    everything: list[Any] = []
    fill = map(everything.extend, map(gc.get_objects, (None,)))
    chosen = compress(everything, map(test, map(type, everything), repeat(kind)))
    empty = map(methodcaller("clear"), (everything,))
    with gc_paused():
        found = list(chain(fill, chosen, empty))
    return found[1:-1]  # without what filling and emptying return


def _instances(kind: type) -> list[Any]:
    """Those whose type is, or derives from, ``kind``.

    ``type(o)`` and not ``isinstance``: a lazy proxy must not be woken up by being looked at.
    """
    return _tracked(issubclass, kind)


def live_roots() -> list[Any]:
    """Every `torch.nn.Module` that no other live module contains, and that has parameters.

    Looks through the objects the garbage collector tracks: some tens of milliseconds, once.
    Loss functions and other modules without parameters are left out.
    """
    modules = _instances(torch.nn.Module)
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
        and _has_parameters(module)
    ]


def _has_parameters(root: Any) -> bool:
    return any(
        parameter is not None
        for _, module in modules_of(root)
        for parameter in module._parameters.values()
    )


def live_tensors() -> list[Any]:
    """Every tensor that has a Python object now.

    Not those that ``torch.func`` hands to a function: they have no storage but another's.
    """
    is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor
    return [tensor for tensor in _instances(torch.Tensor) if not is_wrapped(tensor)]


def is_trained(model: torch.nn.Module) -> bool:
    """Whether an optimizer is alive that changes parameters of the model."""
    mine = {id(p) for _, module in modules_of(model) for p in module._parameters.values()}
    return any(
        id(parameter) in mine
        for optimizer in _instances(torch.optim.Optimizer)
        for group in optimizer.__dict__.get("param_groups", ())
        for parameter in group["params"]
    )


def compile_in_use() -> bool:
    """Whether there is a module or a function that ``torch.compile`` was asked for before now. What
    was compiled and is gone cannot be called again.

    Dynamo marks what it wraps with ``_torchdynamo_orig_callable``; functions it was told to
    leave alone carry ``_torchdynamo_disable`` as well.
    """
    if "torch._dynamo" not in sys.modules:
        return False
    for function in _tracked(is_, FunctionType):
        marks = function.__dict__
        if "_torchdynamo_orig_callable" in marks and not marks.get("_torchdynamo_disable"):
            return True
    return any(
        type(module).__name__ == "OptimizedModule"
        or module.__dict__.get("_compiled_call_impl") is not None
        for module in _instances(torch.nn.Module)
    )
