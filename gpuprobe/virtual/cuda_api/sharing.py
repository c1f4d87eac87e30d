"""Tensors sent to another process: what ``torch.multiprocessing`` asks of C++.

A process has a virtual GPU of its own, so that the receiver gets a copy. It needs a virtual GPU
too: a forked child has its parent's.
"""

from __future__ import annotations

import ctypes
import itertools
import os
from typing import Any, Final

import torch

from gpuprobe.errors import NotModelled
from gpuprobe.patching import Patches
from gpuprobe.virtual.machine import Machine

_NAME: Final = 32  # bytes of a handle that come before the values
_data_ptr = torch._C.StorageBase.data_ptr  # the host memory behind it


def install(machine: Machine, patches: Patches) -> None:
    """Source: ``THPStorage_shareCuda`` in ``torch/csrc/StorageSharing.cpp``."""
    numbers = itertools.count()

    def _share_cuda_(storage: Any) -> tuple[Any, ...]:
        tag = machine.tags.get(storage._cdata)
        if tag is None or tag.place < 0:
            raise RuntimeError("_share_cuda_: only available on CUDA")
        if machine.shapes:
            raise NotModelled(
                "a tensor without values cannot be sent to another process",
                hint="run it with compute='real'",
            )
        # torch keeps what it got by its handle: each sending has one of its own.
        name = f"{os.getpid()}.{next(numbers)}".encode().rjust(_NAME)
        size = storage.nbytes()
        handle = name + ctypes.string_at(_data_ptr(storage), size)
        return tag.place, handle, size, 0, b"", 0, b"", False

    def _new_shared_cuda(cls: Any, device: int, handle: bytes, *rest: Any) -> Any:
        storage = cls(len(handle) - _NAME)
        ctypes.memmove(_data_ptr(storage), handle[_NAME:], storage.nbytes())
        machine.track(storage, device)
        return storage

    patches.set(torch.UntypedStorage, "_share_cuda_", _share_cuda_)
    patches.set(torch.UntypedStorage, "_new_shared_cuda", classmethod(_new_shared_cuda))
    patches.set(
        torch.UntypedStorage, "_release_ipc_counter_cuda", classmethod(lambda cls, *args: None)
    )
