"""What tensors and storages answer about themselves on a virtual machine.

Replaced on the Python classes ``torch.Tensor`` and ``torch.UntypedStorage``: C++ code goes on
seeing CPU or meta tensors.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from gpuprobe.patching import Patches
from gpuprobe.virtual.machine import Machine, Tag, is_meta
from gpuprobe.virtual.torch_patches import (
    constructors,
    indices,
    legacy,
    methods,
    parameters,
    storages,
    subscripts,
)
from gpuprobe.virtual.torch_patches.intercept import Intercept

_Base = torch._C.TensorBase
_CPU = torch.device("cpu")
_PLAIN = (torch.Tensor, torch.nn.Parameter)


class _Attribute(property):
    """In place of an attribute that C++ defines: Dynamo asks those for their class."""

    __objclass__ = torch.Tensor


def install(machine: Machine, intercept: Intercept, patches: Patches) -> None:
    """Replace what needs to know about the virtual machine."""
    _attributes(machine, patches)
    _gradient(machine, patches)
    methods.install(machine, patches)
    storages.install(machine, patches)
    constructors.install(machine, intercept, patches)
    indices.install(patches)
    legacy.install(machine, patches)
    subscripts.install(machine, patches)
    _grouping(patches)


def _attributes(machine: Machine, patches: Patches) -> None:
    devices = [torch.device("cuda", index) for index in range(len(machine.devices))]
    real = {
        name: getattr(_Base, name).__get__ for name in ("device", "is_cuda", "is_cpu", "is_meta")
    }

    local = machine.local

    def tag_of(tensor: Any) -> Tag | None:
        if local.inside:
            return None
        if type(tensor) not in _PLAIN and is_traceable_wrapper_subclass(tensor):
            inner = tensor.__tensor_flatten__()[0]  # a DTensor is where its parts are
            return tag_of(getattr(tensor, inner[0])) if inner else None
        return machine.tag_of(tensor)

    def device(tensor: Any) -> torch.device:
        tag = tag_of(tensor)
        if tag is None:
            return real["device"](tensor)
        return devices[tag.place] if tag.place >= 0 else _CPU

    def is_cuda(tensor: Any) -> bool:
        tag = tag_of(tensor)
        return tag is not None and tag.place >= 0

    def is_cpu(tensor: Any) -> bool:
        tag = tag_of(tensor)
        return bool(real["is_cpu"](tensor)) if tag is None else tag.place < 0

    def tensor_is_meta(tensor: Any) -> bool:
        return tag_of(tensor) is None and bool(real["is_meta"](tensor))

    def read_only(tensor: Any, value: Any) -> None:
        raise AttributeError("attribute 'device' of 'torch._C.TensorBase' objects is not writable")

    for name, getter in (
        ("device", device),
        ("is_cuda", is_cuda),
        ("is_cpu", is_cpu),
        ("is_meta", tensor_is_meta),
    ):
        patches.set(torch.Tensor, name, _Attribute(getter, read_only))

    def get_device(tensor: Any) -> int:
        tag = tag_of(tensor)
        return tag.place if tag is not None and tag.place >= 0 else -1

    patches.set(torch.Tensor, "get_device", get_device)
    patches.set(torch, "get_device", get_device)

    def data_ptr(tensor: Any) -> int:
        tag = tag_of(tensor)
        if tag is None or tag.block is None:
            return _Base.data_ptr(tensor)
        return tag.block.address + tensor.storage_offset() * tensor.element_size()

    patches.set(torch.Tensor, "data_ptr", data_ptr)


def _gradient(machine: Machine, patches: Patches) -> None:
    grad = _Base.grad

    def set_grad(tensor: Any, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            mine, other = machine.place_of(tensor), machine.place_of(value)
            if mine != other and max(mine, other) >= 0:
                raise RuntimeError("assigned grad has data located on a different device")
            if machine.shapes:
                value = parameters.of_kind(machine, value, is_meta(tensor))
                value = parameters.of_shards_kind(machine, value, tensor)
        grad.__set__(tensor, value)

    patches.set(
        torch.Tensor, "grad", _Attribute(grad.__get__, set_grad, grad.__delete__, grad.__doc__)
    )


def _grouping(patches: Patches) -> None:
    """Optimizers group their tensors by device and dtype, in C++: the device is the host's."""
    group = torch._C._group_tensors_by_device_and_dtype

    def grouped(tensorlists: Any, with_indices: bool = False) -> Any:
        found: dict[Any, Any] = {}
        for (_, dtype), (lists, positions) in group(tensorlists, True).items():
            for at, index in enumerate(positions):
                first = lists[0][at]
                key = (_CPU if first is None else first.device, dtype)
                columns, places = found.setdefault(key, ([[] for _ in lists], []))
                for column, values_ in zip(columns, lists, strict=True):
                    if values_:
                        column.append(values_[at])
                places.append(index)
        if not with_indices:
            return {key: (columns, []) for key, (columns, _) in found.items()}
        return found

    patches.set(torch._C, "_group_tensors_by_device_and_dtype", grouped)
