"""``torch.accelerator``, ``torch.Stream`` and the other device-independent names."""

from __future__ import annotations

import functools
from typing import Any

import torch

from gpuprobe.patching import Patches
from gpuprobe.virtual.machine import Machine

_DTYPES = tuple(
    {
        id(value): value
        for value in vars(torch).values()
        if isinstance(value, torch.dtype) and not str(value).startswith(("torch.bits", "torch.q"))
    }.values()
)


class AcceleratorGraph:
    """``torch.accelerator.Graph``: a `torch.cuda.CUDAGraph` that is a context manager."""

    def __init__(
        self,
        keep_graph: bool = False,
        *,
        pool: tuple[int, int] | None = None,
        capture_error_mode: str = "default",
    ) -> None:
        self.graph_pool = pool
        self.capture_error_mode = capture_error_mode
        self._graph: Any = torch.cuda.CUDAGraph(keep_graph)

    def capture_begin(self) -> None:
        mode = self.capture_error_mode
        mode = "global" if mode == "default" else mode
        self._graph.capture_begin(self.graph_pool, capture_error_mode=mode)

    def capture_end(self) -> None:
        self._graph.capture_end()

    def instantiate(self) -> None:
        self._graph.instantiate()

    def replay(self) -> None:
        self._graph.replay()

    def reset(self) -> None:
        self._graph.reset()

    def pool(self) -> tuple[int, int]:
        found: tuple[int, int] = self._graph.pool()
        return found

    def enable_debug_mode(self) -> None:
        self._graph.enable_debug_mode()

    def debug_dump(self, path: str) -> None:
        self._graph.debug_dump(path)

    def __enter__(self) -> None:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        self.capture_begin()

    def __exit__(self, *error: object) -> None:
        self.capture_end()


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

    def capability(device: Any = None) -> dict[str, Any]:
        """Every type, as where a device names none that it lacks (``deviceCapability`` in
        ``c10/core/impl/DeviceGuardImplInterface.h``).
        """
        index = cuda._utils._get_device_index(device, optional=True)
        if not 0 <= index < machine.count:
            raise RuntimeError("invalid device ordinal")
        return {"supported_dtypes": set(_DTYPES)}

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
        "get_device_capability": capability,  # torch's own keeps its first answer
        "empty_host_cache": machine.pinned.empty_cache,
        "Graph": AcceleratorGraph,
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
            "_accelerator_emptyCache": cuda.empty_cache,
            "_accelerator_emptyHostCache": machine.pinned.empty_cache,
            "_accelerator_getDeviceCapability": capability,
        },
    )
