"""``torch.cuda.memory``: statistics, the cache, snapshots."""

from __future__ import annotations

from typing import Any

import torch

from gpuprobe.allocator.settings import parse_conf
from gpuprobe.patching import Patches
from gpuprobe.virtual import values
from gpuprobe.virtual.machine import Machine

__all__ = ["install"]


def install(machine: Machine, patches: Patches) -> None:
    local, devices = machine.local, machine.devices

    def index_of(device: Any) -> int:
        index = torch.cuda._utils._get_device_index(device, optional=True)
        if not 0 <= index < len(devices):
            raise AssertionError(f"Invalid device argument {device}: did you call init?")
        return int(index)

    def mem_get_info(device: Any = None) -> tuple[int, int]:
        found = devices[index_of(device)]
        return found.free_memory, found.total

    def empty_cache() -> None:
        if machine.observer is not None:
            machine.observer.empty_cache()
        for device in devices:
            device.empty_cache()

    raw: dict[int, tuple[int, Any]] = {}

    def raw_alloc(size: int, stream: int) -> int:
        block = devices[local.device].malloc(size, stream if stream < 1 << 20 else 0)
        raw[block.address] = (local.device, block)
        return block.address

    def raw_delete(address: int) -> None:
        index, block = raw.pop(address)
        devices[index].free(block)

    def set_fraction(fraction: float, device: int) -> None:
        found = devices[device]
        found.sim.allowed_maximum = int(fraction * found.total) if fraction < 1.0 else None

    def get_fraction(device: int) -> float:
        found = devices[device]
        allowed = found.sim.allowed_maximum
        return 1.0 if allowed is None else allowed / found.total

    def record_history(
        enabled: Any, context: Any = "all", stacks: str = "all", max_entries: int = 0, *rest: Any
    ) -> None:
        clear = bool(rest[0]) if rest else False
        for device in devices:
            if enabled is None:
                device.history.stop()
            else:
                device.history.start(
                    max_entries=max_entries, clear=clear, events=enabled in ("all", True)
                )
            device.follow_history()

    def snapshot(pool: Any = None) -> dict[str, Any]:
        found = [segment for device in devices for segment in device.history.segments()]
        if pool is not None and tuple(pool[:2]) != (0, 0):
            found = [item for item in found if item["segment_pool_id"] == tuple(pool[:2])]
        settings = machine.settings
        return {
            "segments": found,
            "device_traces": [device.history.events() for device in devices],
            "allocator_settings": {
                "PYTORCH_CUDA_ALLOC_CONF": settings.conf,
                "max_split_size": -1,
                "garbage_collection_threshold": settings.garbage_collection_threshold,
                "expandable_segments": settings.expandable_segments,
                "last_allocator_settings": settings.conf,
                "roundup_power2_divisions": {},
            },
            "external_annotations": [],
        }

    def set_metadata(text: str) -> None:
        for device in devices:
            device.history.metadata = text

    for name, value in {
        "_cuda_memoryStats": lambda device: devices[device].statistics.nested(),
        "_cuda_resetPeakMemoryStats": lambda device: devices[device].statistics.reset_peaks(),
        "_cuda_resetAccumulatedMemoryStats": lambda device: devices[
            device
        ].statistics.reset_accumulated(),
        "_cuda_emptyCache": empty_cache,
        "_cuda_setMemoryFraction": set_fraction,
        "_cuda_getMemoryFraction": get_fraction,
        "_cuda_memorySnapshot": snapshot,
        "_cuda_record_memory_history": record_history,
        "_cuda_record_memory_history_legacy": lambda enabled, *rest: record_history(
            "all" if enabled else None, max_entries=rest[1] if len(rest) > 1 else 1
        ),
        "_cuda_isHistoryEnabled": lambda: any(device.history.on for device in devices),
        "_cuda_attach_out_of_memory_observer": lambda observer: None,
        "_cuda_setMemoryMetadata": set_metadata,
        "_cuda_getMemoryMetadata": lambda: devices[local.device].history.metadata,
        "_cuda_getAllocatorBackend": lambda: "native",
        "_cuda_cudaCachingAllocator_raw_alloc": raw_alloc,
        "_cuda_cudaCachingAllocator_raw_delete": raw_delete,
        "_cuda_cudaCachingAllocator_is_enabled": lambda: True,
        "_cuda_cudaCachingAllocator_enable": lambda value: None,
        # Names that torch's compiler imports where there is a CUDA device.
        "_cuda_CUDAAllocator_AllocatorState": object,
        "_set_cached_tensors_enabled": lambda enabled: None,
        "_cuda_getCublasWorkspaceSize": lambda: devices[local.device].model.cublas_workspace_bytes,
    }.items():
        patches.set(torch._C, name, value)
    patches.set(torch.cuda.memory, "mem_get_info", mem_get_info)
    patches.set(torch.cuda, "mem_get_info", mem_get_info)
    for name in ("host_memory_stats", "host_memory_stats_as_nested_dict"):
        if hasattr(torch.cuda.memory, name):
            patches.set(torch.cuda.memory, name, _host_statistics(machine))
            if hasattr(torch.cuda, name):
                patches.set(torch.cuda, name, _host_statistics(machine))

    def set_settings(conf: str) -> None:
        """Torch allows a change of settings before the first allocation only in part."""
        machine.settings = parse_conf(conf, machine.settings)

    patches.set(torch.cuda.memory, "_set_allocator_settings", set_settings)

    def processes(device: Any = None) -> str:
        index = index_of(device)
        used = devices[index].context + devices[index].sim.reserved
        return f"GPU:{index}\nprocess {'':>6} uses {used / (1 << 20):>12.3f} MB GPU memory"

    patches.set(torch._C, "_MemPool", MemPool := _mem_pool(machine))
    for module in (torch.cuda, torch.cuda.memory):
        if hasattr(module, "MemPool"):
            patches.set(module, "MemPool", MemPool)

    patches.set(torch.cuda.memory, "list_gpu_processes", processes)
    patches.set(torch.cuda, "list_gpu_processes", processes)


def _mem_pool(machine: Machine) -> type:
    class MemPool:
        """``torch.cuda.MemPool``: a private pool of the program's own."""

        def __init__(
            self,
            allocator: Any = None,
            use_on_oom: bool = False,
            no_split: bool = False,
            **rest: Any,
        ) -> None:
            if allocator is not None:
                raise values.not_modelled("a MemPool with an allocator of its own")
            self.id = torch.cuda.graph_pool_handle()
            self.device = torch.device("cuda", machine.local.device)
            machine.devices[machine.local.device].sim.pool(
                self.id[1], no_split=no_split, use_on_oom=use_on_oom
            )

        @property
        def allocator(self) -> None:
            return None

        def use_count(self) -> int:
            return 1

        def snapshot(self, include_traces: bool = True) -> Any:
            return torch.cuda.memory_snapshot(self.id)

    return MemPool


def _host_statistics(machine: Machine) -> Any:
    def stats() -> dict[str, int]:
        sizes = [tag.nbytes for tag in list(machine.tags.values()) if tag.place == -2]
        return {
            "allocated_bytes.current": sum(sizes),
            "active_bytes.current": sum(sizes),
            "allocations.current": len(sizes),
        }

    return stats
