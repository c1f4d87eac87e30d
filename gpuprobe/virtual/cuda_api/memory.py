"""``torch.cuda.memory``: statistics, the cache, snapshots."""

from __future__ import annotations

from typing import Any

import torch

from gpuprobe.allocator.blocks import PoolBlock
from gpuprobe.allocator.settings import parse_conf
from gpuprobe.catalogue.gpu_model import cublas_workspace
from gpuprobe.patching import Patches
from gpuprobe.virtual import unknown
from gpuprobe.virtual.device.virtual_device import VirtualDevice
from gpuprobe.virtual.machine import Machine


class _Memory:
    """The functions of ``torch.cuda.memory``, for the devices of one machine."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.devices = machine.devices
        self._raw: dict[int, tuple[int, PoolBlock]] = {}  # by address, with the device's index

    @property
    def current(self) -> VirtualDevice:
        return self.devices[self.machine.local.device]

    def _named(self, device: Any) -> VirtualDevice:
        index = torch.cuda._utils._get_device_index(device, optional=True)
        if not 0 <= index < len(self.devices):
            raise AssertionError(f"Invalid device argument {device}: did you call init?")
        return self.devices[index]

    def mem_get_info(self, device: Any = None) -> tuple[int, int]:
        found = self._named(device)
        return found.free_memory, found.total

    def empty_cache(self) -> None:
        if self.machine.observer is not None:
            self.machine.observer.empty_cache()
        for device in self.devices:
            device.empty_cache()

    def raw_alloc(self, size: int, stream: int) -> int:
        block = self.current.malloc(size, stream if stream < 1 << 20 else 0)
        self._raw[block.address] = (self.machine.local.device, block)
        return block.address

    def raw_delete(self, address: int) -> None:
        index, block = self._raw.pop(address)
        self.devices[index].free(block)

    def numbered(self, index: int) -> VirtualDevice:
        """Raises RuntimeError for a device that there is not, as torch does."""
        if not 0 <= index < self.machine.count:
            raise RuntimeError(f"Invalid device argument {index}: did you call init?")
        return self.devices[index]

    def set_fraction(self, fraction: float, device: int) -> None:
        found = self.numbered(device)
        found.sim.allowed_maximum = int(fraction * found.total) if fraction < 1.0 else None

    def get_fraction(self, device: int) -> float:
        found = self.numbered(device)
        allowed = found.sim.allowed_maximum
        return 1.0 if allowed is None else allowed / found.total

    def record_history(
        self,
        enabled: Any,
        context: Any = "all",
        stacks: str = "all",
        max_entries: int = 0,
        *rest: Any,
    ) -> None:
        clear = bool(rest[0]) if rest else False
        for device in self.devices:
            if enabled is None:
                device.history.stop()
            else:
                events = enabled in ("all", True)
                device.history.start(max_entries=max_entries, clear=clear, events=events)
            device.follow_history()

    def record_history_legacy(self, enabled: Any, *rest: Any) -> None:
        entries = rest[1] if len(rest) > 1 else 1
        self.record_history("all" if enabled else None, max_entries=entries)

    def snapshot(self, pool: Any = None) -> dict[str, Any]:
        found = [segment for device in self.devices for segment in device.history.segments()]
        if pool is not None and tuple(pool[:2]) != (0, 0):
            found = [item for item in found if item["segment_pool_id"] == tuple(pool[:2])]
        settings = self.machine.settings
        return {
            "segments": found,
            "device_traces": [device.history.events() for device in self.devices],
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

    def set_metadata(self, text: str) -> None:
        for device in self.devices:
            device.history.metadata = text

    def set_settings(self, conf: str) -> None:
        """They count for what is allocated from now on, as those of
        ``CUDAAllocatorConfig::parseArgs`` do.
        """
        self.machine.use.use()
        self.machine.configure(parse_conf(conf, self.machine.settings))

    def processes(self, device: Any = None) -> str:
        found = self._named(device)
        used = (found.context + found.sim.reserved) / (1 << 20)
        return f"GPU:{found.index}\nprocess {'':>6} uses {used:>12.3f} MB GPU memory"


class MemPool:
    """``torch.cuda.MemPool``: a private pool of the program's own."""

    _machine: Machine  # the one that is in use

    def __init__(
        self,
        allocator: Any = None,
        use_on_oom: bool = False,
        no_split: bool = False,
        **rest: Any,
    ) -> None:
        if allocator is not None:
            raise unknown.not_modelled("a MemPool with its own allocator")
        self.id = torch.cuda.graph_pool_handle()
        index = self._machine.local.device
        self.device = torch.device("cuda", index)
        pools = self._machine.devices[index].sim
        pools.pool(self.id[1], no_split=no_split, use_on_oom=use_on_oom)

    @property
    def allocator(self) -> None:
        return None

    def use_count(self) -> int:
        return 1

    def snapshot(self, include_traces: bool = True) -> Any:
        return torch.cuda.memory_snapshot(self.id)


def install(machine: Machine, patches: Patches) -> None:
    memory, devices = _Memory(machine), machine.devices
    pool = type("MemPool", (MemPool,), {"_machine": machine})
    below: dict[str, Any] = {
        "_cuda_memoryStats": lambda index: memory.numbered(index).statistics.nested(),
        "_cuda_resetPeakMemoryStats": lambda index: memory.numbered(index).statistics.reset_peaks(),
        "_cuda_resetAccumulatedMemoryStats": (
            lambda index: memory.numbered(index).statistics.reset_accumulated()
        ),
        "_cuda_emptyCache": memory.empty_cache,
        "_cuda_setMemoryFraction": memory.set_fraction,
        "_cuda_getMemoryFraction": memory.get_fraction,
        "_cuda_memorySnapshot": memory.snapshot,
        "_cuda_record_memory_history": memory.record_history,
        "_cuda_record_memory_history_legacy": memory.record_history_legacy,
        "_cuda_isHistoryEnabled": lambda: any(device.history.on for device in devices),
        "_cuda_attach_out_of_memory_observer": lambda observer: None,
        "_cuda_setMemoryMetadata": memory.set_metadata,
        "_cuda_getMemoryMetadata": lambda: memory.current.history.metadata,
        "_cuda_getAllocatorBackend": lambda: "native",
        "_cuda_cudaCachingAllocator_raw_alloc": memory.raw_alloc,
        "_cuda_cudaCachingAllocator_raw_delete": memory.raw_delete,
        "_cuda_cudaCachingAllocator_is_enabled": lambda: True,
        "_cuda_cudaCachingAllocator_enable": lambda value: None,
        # Names that torch's compiler imports where there is a CUDA device.
        "_cuda_CUDAAllocator_AllocatorState": object,
        "_set_cached_tensors_enabled": lambda enabled: None,
        "_cuda_getCublasWorkspaceSize": lambda: cublas_workspace(
            memory.current.model.capability, machine.torch
        ),
        "_MemPool": pool,
        "_cuda_hostMemoryStats": machine.pinned.nested,
        "_cuda_resetPeakHostMemoryStats": machine.pinned.reset_peaks,
        "_cuda_resetAccumulatedHostMemoryStats": machine.pinned.reset_accumulated,
        "_host_emptyCache": machine.pinned.empty_cache,
    }
    patches.set_each(torch._C, below)
    patches.set(torch.cuda.memory, "_set_allocator_settings", memory.set_settings)
    # In torch.cuda too, which imports them by name; some only newer versions have.
    names: dict[str, Any] = {
        "mem_get_info": memory.mem_get_info,
        "list_gpu_processes": memory.processes,
        "MemPool": pool,
    }
    for module in (torch.cuda, torch.cuda.memory):
        patches.set_each(
            module, {name: value for name, value in names.items() if hasattr(module, name)}
        )
