"""What storages answer about themselves, and how they are saved and loaded."""

from __future__ import annotations

from typing import Any

import torch

from gpuprobe.patching import Patches
from gpuprobe.virtual.machine import Machine, Tag
from gpuprobe.virtual.torch_patches.indices import device_named
from gpuprobe.virtual.torch_patches.keys import below

_CPU = torch.device("cpu")


def install(machine: Machine, patches: Patches) -> None:
    _attributes(machine, patches)
    _copies(machine, patches)
    _serialization(machine, patches)


def _attributes(machine: Machine, patches: Patches) -> None:
    tags = machine.tags
    Storage = torch.UntypedStorage
    base = torch._C.StorageBase

    def tag_of(storage: Any) -> Tag | None:
        return tags.get(storage._cdata)

    original_device = base.device.__get__
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
            return original_device(storage)
        return torch.device("cuda", tag.place) if tag.place >= 0 else _CPU

    patches.set(Storage, "device", property(device))

    def is_cuda(storage: Any) -> bool:
        tag = tag_of(storage)
        return tag is not None and tag.place >= 0

    patches.set(Storage, "is_cuda", property(is_cuda))

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
    original_device = torch._C.StorageBase.device.__get__

    def as_tensor(storage: Any) -> Any:
        return torch.empty(0, dtype=torch.uint8, device=original_device(storage)).set_(storage)

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
        if index >= len(machine.devices):
            raise RuntimeError(
                f"Attempting to deserialize object on CUDA device {index} but "
                f"torch.cuda.device_count() is {len(machine.devices)}. Please use torch.load "
                "with map_location to map your storages to an existing device."
            )
        untyped = storage if isinstance(storage, torch.UntypedStorage) else storage._untyped_storage
        with below():
            if machine.shapes:
                untyped = torch.UntypedStorage(untyped.nbytes(), device="meta")
        if machine.tags.get(untyped._cdata) is None:
            machine.track(untyped, index)
        return untyped

    before = list(serialization._package_registry)
    serialization.register_package(-1, tag, deserialize)

    def undo() -> None:
        serialization._package_registry[:] = before

    patches.add(undo)
