"""What storages answer about themselves, and how they are saved and loaded."""

from __future__ import annotations

from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch.multiprocessing.reductions import reduce_tensor

from gpuprobe.patching import Patches
from gpuprobe.virtual.machine import HOST, Machine, Tag, is_meta
from gpuprobe.virtual.reads.known import is_known
from gpuprobe.virtual.torch_patches.indices import device_named
from gpuprobe.virtual.torch_patches.keys import below
from gpuprobe.virtual.torch_patches.parameters import host_values

_CPU = torch.device("cpu")
_device_of = torch._C.StorageBase.device.__get__


_machines: list[Machine] = []
"""The one that is in use, for what pickle calls by name."""


def install(machine: Machine, patches: Patches) -> None:
    _attributes(machine, patches)
    _copies(machine, patches)
    _serialization(machine, patches)
    if machine.shapes:
        _pickles(machine, patches)


def _attributes(machine: Machine, patches: Patches) -> None:
    tags = machine.tags
    Storage = torch.UntypedStorage
    base = torch._C.StorageBase

    def tag_of(storage: Any) -> Tag | None:
        return tags.get(storage._cdata)

    original_new = Storage.__new__

    def new(cls: Any, *args: Any, device: Any = None, **options: Any) -> Any:
        """``torch.UntypedStorage(nbytes, device="cuda")``."""
        wanted = None if device is None else device_named(device)
        if wanted is None or wanted.type != "cuda":
            if device is not None:
                options["device"] = device
            return original_new(cls, *args, **options)
        index = machine.local.device if wanted.index is None else wanted.index
        host = "meta" if machine.shapes else "cpu"
        made = original_new(cls, *args, device=host, **options)
        machine.track(made, index)
        return made

    patches.set(Storage, "__new__", staticmethod(new))

    def device(storage: Any) -> torch.device:
        tag = tag_of(storage)
        if tag is None:
            return _device_of(storage)
        return torch.device("cuda", tag.place) if tag.place >= 0 else _CPU

    patches.set(Storage, "device", property(device))

    def is_cuda(storage: Any) -> bool:
        tag = tag_of(storage)
        return tag is not None and tag.place >= 0

    patches.set(Storage, "is_cuda", property(is_cuda))

    original_shared = Storage.is_shared

    def is_shared(storage: Any) -> bool:
        """Memory of a device always is (``Tensor.is_shared``)."""
        return is_cuda(storage) or bool(original_shared(storage))

    patches.set(Storage, "is_shared", is_shared)

    def data_ptr(storage: Any) -> int:
        tag = tag_of(storage)
        if tag is None or tag.block is None:
            return base.data_ptr(storage)
        return tag.block.address

    patches.set(Storage, "data_ptr", data_ptr)

    def resize_(storage: Any, nbytes: int) -> Any:
        result = base.resize_(storage, nbytes)
        tag = tag_of(storage)
        if tag is not None and tag.nbytes != storage.nbytes():
            machine.resized(tag, storage)
        return result

    patches.set(Storage, "resize_", resize_)


def _copies(machine: Machine, patches: Patches) -> None:
    Storage = torch.UntypedStorage

    def as_tensor(storage: Any) -> Any:
        return torch.empty(0, dtype=torch.uint8, device=_device_of(storage)).set_(storage)

    def cpu(storage: Any) -> Any:
        if storage.is_cuda:
            return as_tensor(storage).cpu().untyped_storage()
        return original_cpu(storage)

    original_cpu = Storage.cpu
    patches.set(Storage, "cpu", cpu)

    def clone(storage: Any) -> Any:
        if machine.tags.get(storage._cdata) is None:
            return original_clone(storage)
        return as_tensor(storage).clone().untyped_storage()

    original_clone = Storage.clone
    patches.set(Storage, "clone", clone)


def _serialization(machine: Machine, patches: Patches) -> None:
    """``torch.save`` and ``torch.load`` know where a storage lies, and put it there."""
    import torch.serialization as serialization

    def tag(storage: Any) -> str | None:
        tag = machine.tags.get(storage._cdata)
        return f"cuda:{tag.place}" if tag is not None and tag.place >= 0 else None

    def deserialize(storage: Any, location: str) -> Any:
        if not location.startswith("cuda"):
            return None
        device = torch.device(location)
        index = machine.local.device if device.index is None else device.index
        if index >= machine.count:
            raise RuntimeError(
                f"Attempting to deserialize object on CUDA device {index} but "
                f"torch.cuda.device_count() is {machine.count}. Please use torch.load "
                "with map_location to map your storages to an existing device."
            )
        untyped = storage if isinstance(storage, torch.UntypedStorage) else storage._untyped_storage
        if not machine.shapes:
            if machine.tags.get(untyped._cdata) is None:
                machine.track(untyped, index)
            return untyped
        with below():
            made = torch.UntypedStorage(untyped.nbytes(), device="meta")
        tag = machine.track(made, index)
        # Of which type its elements are is not known yet.
        if _device_of(untyped).type == "cpu" and untyped.nbytes() <= machine.limits.floating:
            tag.values = untyped
        return made

    before = list(serialization._package_registry)
    serialization.register_package(-1, tag, deserialize)

    def undo() -> None:
        serialization._package_registry[:] = before

    patches.add(undo)


def _pickles(machine: Machine, patches: Patches) -> None:
    """Host tensors without memory are pickled as their values, where those are known. What goes
    to another process (samples that a worker of a DataLoader has made) may be unknown there too.
    """
    original = torch.Tensor._reduce_ex_internal

    def reduce_ex(tensor: Any, protocol: Any) -> Any:
        if is_meta(tensor) and machine.place_of(tensor) < 0 and is_known(machine, tensor):
            values = host_values(machine, tensor)
            return original(values.requires_grad_(tensor.requires_grad), protocol)
        return original(tensor, protocol)

    patches.set(torch.Tensor, "_reduce_ex_internal", reduce_ex)

    def reduce_to_process(tensor: Any) -> Any:
        if tensor.layout is torch.strided and machine.place_of(tensor) < 0:
            if is_known(machine, tensor):
                values = host_values(machine, tensor)
                return reduce_tensor(values.requires_grad_(tensor.requires_grad))
            if machine.tag_of(tensor) is not None:
                shape = (tensor.size(), tensor.stride(), tensor.storage_offset())
                size = tensor.untyped_storage().nbytes()
                return _unknown, (shape, size, tensor.dtype, tensor.requires_grad)
        return reduce_tensor(tensor)

    _machines.append(machine)
    patches.add(_machines.clear)
    before = getattr(ForkingPickler, "_extra_reducers")[torch.Tensor]  # noqa: B009 - untyped
    ForkingPickler.register(torch.Tensor, reduce_to_process)
    patches.add(lambda: ForkingPickler.register(torch.Tensor, before))


def _unknown(shape: tuple[Any, ...], nbytes: int, dtype: torch.dtype, grad: bool) -> Any:
    """A host tensor whose values another process does not know either."""
    with below():
        made = torch.empty(0, dtype=dtype, device="meta")
        size, stride, offset = shape
        made.set_(torch.UntypedStorage(nbytes, device="meta"), offset, size, stride)
    for machine in _machines:
        machine.track(made.untyped_storage(), HOST)
    return made.requires_grad_(grad)
