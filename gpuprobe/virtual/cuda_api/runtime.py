"""``torch.cuda.cudart()``: the functions of the CUDA runtime that torch hands out.

Source: ``initCudartBindings`` in ``torch/csrc/cuda/shared/cudart.cpp``.
"""

from __future__ import annotations

import ctypes
import enum
import itertools
from typing import Final

import torch

from gpuprobe.hazards.observer import RegisteredMemory
from gpuprobe.patching import Patches
from gpuprobe.virtual.machine import Machine

_FIRST_HANDLE: Final = 1 << 40  # beyond the numbers of torch's own streams


class CudaError(enum.IntEnum):
    """``cudaError_t``, as far as these functions return it. Other numbers are errors too, without
    a name here.
    """

    success = 0
    invalid_value = 1
    host_memory_already_registered = 712
    host_memory_not_registered = 713
    invalid_resource_handle = 400

    @classmethod
    def _missing_(cls, value: object) -> CudaError | None:
        if not isinstance(value, int):
            return None
        made = int.__new__(cls, value)
        made._name_, made._value_ = f"error_{value}", value
        return made


_TEXTS: Final = {
    0: "no error",
    1: "invalid argument",
    2: "out of memory",
    400: "invalid resource handle",
    600: "device not ready",
    712: "part or all of the requested memory range is already mapped",
    713: "pointer does not correspond to a registered memory region",
}


class Runtime:
    """The module ``torch._C._cudart``."""

    cudaError = CudaError

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._handles = itertools.count(_FIRST_HANDLE)
        self._streams: set[int] = set()

    def cudaGetErrorString(self, error: int) -> str:
        return _TEXTS.get(int(error), "unrecognized error code")

    def cudaProfilerStart(self) -> CudaError:
        return CudaError.success

    def cudaProfilerStop(self) -> CudaError:
        return CudaError.success

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> CudaError:
        """Host memory is pinned where it lies: tensors there are pinned from now on. Ranges may
        not overlap (CUDA runtime API, "Memory Management").
        """
        if not nbytes or not address:
            return CudaError.invalid_value
        for memory in self._machine.registered.values():
            if memory.overlaps(address, nbytes):
                return CudaError.host_memory_already_registered
        self._machine.registered[address] = RegisteredMemory(address, nbytes)
        return CudaError.success

    def cudaHostUnregister(self, address: int) -> CudaError:
        memory = self._machine.registered.get(address)
        if memory is None:
            return CudaError.host_memory_not_registered
        self._machine.unregister(memory)
        return CudaError.success

    def cudaStreamCreate(self, pointer: int) -> CudaError:
        """Writes a handle, for ``torch.cuda.ExternalStream``, to ``pointer``."""
        handle = next(self._handles)
        self._streams.add(handle)
        self._machine.created_streams.add(handle)
        ctypes.c_void_p.from_address(pointer).value = handle
        return CudaError.success

    def cudaStreamDestroy(self, handle: int) -> CudaError:
        if handle not in self._streams:
            return CudaError.invalid_resource_handle
        self._streams.remove(handle)
        return CudaError.success

    def cudaMemGetInfo(self, device: int) -> tuple[int, int]:
        """Free and total bytes."""
        found = self._machine.devices[device]
        return found.free_memory, found.total


def install(machine: Machine, patches: Patches) -> None:
    runtime = Runtime(machine)
    patches.set(torch._C, "_cudart", runtime)
    patches.set(torch.cuda, "_cudart", runtime)
