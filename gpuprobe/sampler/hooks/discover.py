"""The program's models, found among all living objects, and whether they are trained or
compiled.
"""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable
from itertools import chain, compress, repeat
from operator import is_, methodcaller
from types import FunctionType
from typing import Any, NamedTuple, TypeVar

import torch

from gpuprobe.model.io.files import gc_paused
from gpuprobe.sampler.tracing.tensors import modules_of
from gpuprobe.user_frames import Owner, owner_of

_T = TypeVar("_T")


def _tracked(test: Callable[[Any, type[_T]], bool], kind: type[_T]) -> list[_T]:
    """The objects that the garbage collector tracks and for whose type ``test(type, kind)`` is
    true.

    A list of all objects must not live while another thread runs. It would contain a tuple that
    ``tuple(iterator)`` is still filling, and Python refuses to finish a tuple with other
    references: the thread would get a SystemError. So the list is filled, walked and emptied inside
    one call of C code, which keeps the interpreter to itself: no step of it is Python code
    (``test`` must not be either), and no collection runs meanwhile.
    """
    everything: list[Any] = []
    fill = map(everything.extend, map(gc.get_objects, (None,)))
    chosen = compress(everything, map(test, map(type, everything), repeat(kind)))
    empty = map(methodcaller("clear"), (everything,))
    with gc_paused():
        found = list(chain(fill, chosen, empty))
    return found[1:-1]  # without what filling and emptying return


def _instances(kind: type[_T]) -> list[_T]:
    """The objects whose type is, or derives from, ``kind``.

    ``type(o)`` and not ``isinstance``: that would wake up a lazy proxy.
    """
    return _tracked(issubclass, kind)


def live_roots() -> list[torch.nn.Module]:
    """Every `torch.nn.Module` that no other live module contains, and that has parameters.

    Searches the objects the garbage collector tracks: some tens of milliseconds, once. Loss
    functions and other modules without parameters are left out.
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
        # What torch.jit made of a module refuses hooks, and its parts are not Python.
        and not isinstance(module, torch.jit.ScriptModule)
        and _has_parameters(module)
    ]


class ModelPart(NamedTuple):
    """A module inside of a model. ``whole``: it is a model that others only wrap, such as the
    ``module`` of `DistributedDataParallel`. ``owner``: the model, or the innermost such one.
    """

    module: weakref.ref[torch.nn.Module]
    whole: bool
    owner: weakref.ref[torch.nn.Module]

    @property
    def training(self) -> bool:
        """Whether it is called to train: a part in eval mode may be a frozen one of a model."""
        module, owner = self.module(), self.owner()
        return any(one is not None and one.training for one in (module, owner))


def parts_of(model: torch.nn.Module) -> dict[int, ModelPart]:
    """By id, the modules inside of a model that a program may call alone. Layers of torch
    are left out: without a call of one of the others, their calls do not show a forward pass.
    """
    parts: dict[int, ModelPart] = {}
    owner, whole = model, _wrapped(model)
    while whole is not None and id(whole) not in parts:
        parts[id(whole)] = ModelPart(weakref.ref(whole), True, weakref.ref(whole))
        owner, whole = whole, _wrapped(whole)
    for _, module in modules_of(model):
        known = module is model or id(module) in parts
        if not known and _callable(module) and not _is_layer_of_torch(module):
            parts[id(module)] = ModelPart(weakref.ref(module), False, weakref.ref(owner))
    return parts


def _wrapped(module: torch.nn.Module) -> torch.nn.Module | None:
    """The only module in one that has no other parameters."""
    parameters = module.__dict__.get("_parameters") or {}
    children = [one for one in (module.__dict__.get("_modules") or {}).values() if one is not None]
    own = any(parameter is not None for parameter in parameters.values())
    if own or len(children) != 1 or not _callable(children[0]):
        return None
    return children[0]


def _callable(module: torch.nn.Module) -> bool:
    """Whether a module can be called, and its class be wrapped."""
    kind = type(module)
    return kind is not torch.nn.Module and not issubclass(
        kind, (torch.nn.ModuleList, torch.nn.ModuleDict, torch.jit.ScriptModule)
    )


def _is_layer_of_torch(module: torch.nn.Module) -> bool:
    children = module.__dict__.get("_modules")
    return not children and type(module).__module__.partition(".")[0] == "torch"


def _has_parameters(root: torch.nn.Module) -> bool:
    return any(
        parameter is not None
        for _, module in modules_of(root)
        for parameter in module._parameters.values()
    )


def live_tensors() -> list[torch.Tensor]:
    """Every tensor that has a Python object now.

    Not those that ``torch.func`` passes to a function: they share the storage of another tensor.
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
    """Whether a module or function exists that ``torch.compile`` was called for. What was compiled
    and no longer exists cannot be called again.

    Dynamo marks what it wraps with ``_torchdynamo_orig_callable``; functions that it must not
    compile have ``_torchdynamo_disable`` as well. A function of an installed package counts once it
    was compiled: bitsandbytes, which peft imports, wraps some that most programs never call.
    """
    if "torch._dynamo" not in sys.modules:
        return False
    if any(map(_is_compiled, _tracked(is_, FunctionType))):
        return True
    return any(
        type(module).__name__ == "OptimizedModule"
        or module.__dict__.get("_compiled_call_impl") is not None
        for module in _instances(torch.nn.Module)
    )


def _is_compiled(function: FunctionType) -> bool:
    marks = function.__dict__
    if "_torchdynamo_orig_callable" not in marks or marks.get("_torchdynamo_disable"):
        return False
    code = getattr(marks["_torchdynamo_orig_callable"], "__code__", None)
    if code is None or owner_of(code.co_filename) is Owner.USER:
        return True
    return bool(torch._C._dynamo.eval_frame._debug_get_cache_entry_list(code))
