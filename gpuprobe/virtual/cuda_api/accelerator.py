"""``torch.accelerator``, ``torch.Stream`` and the other device-independent names."""

from __future__ import annotations

import functools
from typing import Any

import torch

from gpuprobe.patching import Patches
from gpuprobe.virtual.machine import Machine


def install(machine: Machine, patches: Patches) -> None:
    patches.set(torch, "Stream", torch.cuda.Stream)
    original_module = torch.get_device_module

    # torch's compiler looks for what the cache is wrapped around.
    @functools.wraps(getattr(original_module, "__wrapped__", original_module))
    def device_module(device: Any = None) -> Any:
        if device is None:
            return torch.cuda
        return original_module(device)

    patches.set(torch, "get_device_module", device_module)
    accelerator = getattr(torch, "accelerator", None)
    if accelerator is None:  # torch before 2.6
        return
    cuda = torch.cuda
    names: dict[str, Any] = {
        "is_available": lambda: True,
        "device_count": lambda: machine.count,
        "current_accelerator": lambda check_available=False: torch.device("cuda"),
        "current_device_index": cuda.current_device,
        "current_device_idx": cuda.current_device,
        "set_device_index": cuda.set_device,
        "set_device_idx": cuda.set_device,
        "current_stream": lambda device=None: cuda.current_stream(device),
        "set_stream": lambda stream: cuda.set_stream(stream),
        "synchronize": lambda device=None: cuda.synchronize(device),
        "empty_cache": cuda.empty_cache,
        "memory_stats": cuda.memory_stats,
        "memory_allocated": cuda.memory_allocated,
        "max_memory_allocated": cuda.max_memory_allocated,
        "memory_reserved": cuda.memory_reserved,
        "max_memory_reserved": cuda.max_memory_reserved,
        "reset_peak_memory_stats": cuda.reset_peak_memory_stats,
        "reset_accumulated_memory_stats": cuda.reset_accumulated_memory_stats,
        "get_memory_info": cuda.mem_get_info,
    }
    for name, value in names.items():
        if hasattr(accelerator, name):
            patches.set(accelerator, name, value)
    patches.set_each(
        torch._C,
        {
            "_get_accelerator": lambda check=False: torch.device("cuda"),
            "_accelerator_getAccelerator": lambda: torch.device("cuda"),
            "_accelerator_getDeviceIndex": cuda.current_device,
            "_accelerator_setDeviceIndex": cuda.set_device,
            "_accelerator_exchangeDevice": torch.cuda._exchange_device,
            "_accelerator_maybeExchangeDevice": torch.cuda._maybe_exchange_device,
            "_accelerator_getStream": lambda index: cuda.current_stream(index),
            "_accelerator_setStream": lambda stream: cuda.set_stream(stream),
            "_accelerator_synchronizeDevice": lambda index: cuda.synchronize(index),
            "_accelerator_isAllocatorInitialized": lambda: True,
        },
    )
