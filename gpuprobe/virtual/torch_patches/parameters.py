"""Parameters, and tensors that take over another's memory (``compute="shapes"``).

``module.to("cuda")`` has a parameter take over the memory of its copy, ``param.data = copy``, and
torch lets no CPU tensor take over a meta tensor's. So a parameter is a meta tensor from the
beginning, with values where they are few (`known`); so is what else is to have a gradient, for
the engine wants gradients to be of the kind of their tensors.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import torch
import torch.nn.parameter

from gpuprobe.patching import Patches
from gpuprobe.virtual.machine import Machine, is_meta
from gpuprobe.virtual.reads.known import is_known, values_of, with_memory, without_memory
from gpuprobe.virtual.torch_patches.keys import below

_Base = torch._C.TensorBase
_PLAIN = (torch.Tensor, torch.nn.Parameter)


def install(machine: Machine, patches: Patches) -> None:
    """After all methods were replaced."""
    _lazy(machine, patches)
    if machine.shapes:
        _parameters(machine, patches)
        _data(machine, patches)
        _requires_grad(machine, patches)


def leaf(machine: Machine, tensor: Any) -> Any:
    """A host tensor that is to have a gradient."""
    return _meta(machine, tensor).requires_grad_()


def of_kind(machine: Machine, value: Any, meta: bool) -> Any:
    """``value`` as a tensor without memory (``meta``) or with, if it is a plain one."""
    if not _plain(value) or is_meta(value) == meta:
        return value
    if not is_meta(value):
        return _meta(machine, value)
    tag = machine.tag_of(value)
    if tag is None:
        return value  # the program's own meta tensor
    with below(), torch._C._DisableTorchDispatch():
        made = with_memory(machine, value)
    if tag.place >= 0:
        lost = not is_known(machine, made)
        machine.track(made.untyped_storage(), tag.place, instead=tag).lost = lost
    return made


def of_shards_kind(machine: Machine, value: Any, tensor: Any) -> Any:
    """``value`` with a shard of the kind of the shard of ``tensor``, if both are distributed: FSDP
    keeps those that it offloads in host memory.
    """
    mine, other = (getattr(one, "_local_tensor", None) for one in (tensor, value))
    if mine is None or other is None or is_meta(mine) == is_meta(other):
        return value
    return type(value)(of_kind(machine, other, is_meta(mine)), value._spec, requires_grad=False)


def as_parameters(machine: Machine, value: Any) -> Any:
    """Host tensors among arguments as meta tensors, where C++ code wants those of a call to be of
    the kind of its parameters.
    """
    if isinstance(value, torch.Tensor):
        return _meta(machine, value) if value.is_floating_point() else value
    if isinstance(value, (list, tuple)):
        return type(value)([as_parameters(machine, item) for item in value])
    return value


def host_values(machine: Machine, tensor: Any) -> Any:
    """The CPU tensor with the values of one that is known: itself, or one that shares them."""
    with below(), torch._C._DisableTorchDispatch(), torch.no_grad():
        return values_of(machine, tensor)


def _plain(tensor: Any) -> bool:
    return type(tensor) in _PLAIN and tensor.layout is torch.strided


def _meta(machine: Machine, tensor: Any) -> Any:
    if not _plain(tensor) or is_meta(tensor) or machine.place_of(tensor) >= 0:
        return tensor
    with below(), torch._C._DisableTorchDispatch():
        return without_memory(machine, tensor)


def _parameters(machine: Machine, patches: Patches) -> None:
    original = torch.nn.Parameter.__new__

    def new(cls: Any, data: Any = None, requires_grad: bool = True) -> Any:
        if data is None:
            data = torch.empty(0)
        # Where samples are prepared, values are needed; a model of another child may come to a GPU.
        samples = machine.in_child() and torch.utils.data.get_worker_info() is not None
        if not machine.local.inside and not samples:
            data = _meta(machine, data)
        return original(cls, data, requires_grad)

    patches.set(torch.nn.Parameter, "__new__", staticmethod(new))
    for kind in (torch.nn.parameter.UninitializedParameter,
                 torch.nn.parameter.UninitializedBuffer):  # fmt: skip
        patches.set(kind, "__new__", staticmethod(_without_values(machine, kind)))


def _data(machine: Machine, patches: Patches) -> None:
    data = _Base.data

    class Data(property):
        __objclass__ = torch.Tensor

    def set_data(tensor: Any, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            value = of_kind(machine, value, is_meta(tensor))
        data.__set__(tensor, value)

    patches.set(torch.Tensor, "data", Data(data.__get__, set_data, data.__delete__, data.__doc__))
    compatible: Any = torch._has_compatible_shallow_copy_type

    # The parameters have the names that the compiler expects of what it compiles otherwise.
    def has_compatible_shallow_copy_type(input: Any, from_: Any) -> bool:
        """Asked by ``Module.to``, before it sets ``param.data``."""
        if _plain(input) and _plain(from_) and is_meta(input) != is_meta(from_):
            return machine.tag_of(input if is_meta(input) else from_) is not None
        return bool(compatible(input, from_))

    patches.set(torch, "_has_compatible_shallow_copy_type", has_compatible_shallow_copy_type)


def _requires_grad(machine: Machine, patches: Patches) -> None:
    """A host tensor that is to have a gradient from now on becomes a meta tensor."""
    original = _Base.requires_grad_
    attribute = _Base.requires_grad

    class RequiresGrad(property):
        __objclass__ = torch.Tensor

    def become(tensor: Any) -> None:
        if machine.local.inside or attribute.__get__(tensor) or not tensor.is_floating_point():
            return
        made = _meta(machine, tensor)
        if made is not tensor and type(tensor) is torch.Tensor:
            with contextlib.suppress(RuntimeError):  # somebody else holds it: it stays as it is
                torch._C._swap_tensor_impl(tensor, made)

    @functools.wraps(original)
    def requires_grad_(tensor: Any, requires_grad: bool = True) -> Any:
        if requires_grad:
            become(tensor)
        return original(tensor, requires_grad)

    def set_attribute(tensor: Any, value: bool) -> None:
        if value:
            become(tensor)
        attribute.__set__(tensor, value)

    patches.set(torch.Tensor, "requires_grad_", requires_grad_)
    mine = RequiresGrad(attribute.__get__, set_attribute, None, attribute.__doc__)
    patches.set(torch.Tensor, "requires_grad", mine)


def _lazy(machine: Machine, patches: Patches) -> None:
    """Parameters of lazy modules let only listed methods be called before they have a shape.
    List what replaces a listed method, too: torch knows them by their identity.
    """
    mixin: Any = torch.nn.parameter.UninitializedTensorMixin
    listed = mixin._allowed_methods
    named = [getattr(torch.Tensor, getattr(method, "__name__", ""), None) for method in listed]
    replaced = [new for new, old in zip(named, listed, strict=True) if new not in (None, old)]
    patches.set(mixin, "_allowed_methods", [*listed, *replaced])


def _without_values(machine: Machine, kind: Any) -> Any:
    """What is to become a weight has no memory, as a weight."""
    original = kind.__new__

    def new(cls: Any, requires_grad: bool = kind.__new__.__defaults__[0], *args: Any,
            **options: Any) -> Any:  # fmt: skip
        made = original(cls, requires_grad, *args, **options)
        if made.is_cuda:
            return made
        with torch._C.DisableTorchFunctionSubclass():
            data = _meta(machine, torch.empty(0, dtype=made.dtype))
        result = torch.Tensor._make_subclass(cls, data, requires_grad)
        vars(result).update(vars(made))  # what a buffer has of its own
        return result

    return new
