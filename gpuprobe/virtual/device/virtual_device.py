"""One virtual CUDA device: a catalogue entry, its caching allocator, its streams."""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from gpuprobe.allocator.blocks import PoolBlock, tie_rule_of
from gpuprobe.allocator.driver import SimulatedDriver
from gpuprobe.allocator.settings import memory_fraction
from gpuprobe.allocator.simulator import Simulator
from gpuprobe.allocator.state import Listener
from gpuprobe.catalogue.gpus import GpuModel
from gpuprobe.model.trace import AllocatorSettings
from gpuprobe.virtual.device.history import History
from gpuprobe.virtual.device.statistics import Statistics


class VirtualDevice:
    """One device. All methods may be called from any thread, and from a weak reference's
    callback in the middle of one another: frees that arrive while the allocator is at work
    wait until it is done.

    ``context`` (bytes) is what the driver holds for the process besides the allocator; it is
    not available to the allocator. ``endless``: the device never runs out of memory.
    """

    def __init__(
        self,
        index: int,
        model: GpuModel,
        settings: AllocatorSettings,
        *,
        context: int,
        order: str = "driver",
        endless: bool = False,
    ) -> None:
        self.index = index
        self.model = model
        self.settings = settings
        self.context = context
        self.driver = SimulatedDriver(None if endless else model.total_memory - context, order)
        self.sim = Simulator(
            settings,
            self.driver,
            device_memory=model.total_memory,
            tie_rule=tie_rule_of(torch.__version__) or "segment",
        )
        self.statistics = Statistics(self.sim)
        self.history = History(index, self.sim, lambda: self.free_memory)
        self.listeners: list[Listener] = [self.statistics.on_event]
        self.sim.listener = self._on_event
        # Streams with work that the host has not waited for. The default stream's is not followed
        # before there are others: it counts as busy until the host waits for it.
        self.busy_streams = {0}
        self._lock = threading.RLock()
        self._busy = False
        self._waiting: deque[PoolBlock] = deque()
        self.workspaces: dict[tuple[Any, ...], PoolBlock] = {}
        # Bytes that may be allocated whatever the device has, and the error for more.
        self.bound: int | None = None
        self.beyond: Callable[[int], BaseException] | None = None

    def number(self, index: int) -> None:
        """Be the device of this number; nothing has been allocated yet."""
        self.index = index
        self.history.device = index

    def configure(self, settings: AllocatorSettings) -> None:
        """Have the allocator go by these settings from now on."""
        self.settings = settings
        self.sim.configure(settings)

    def _on_event(self, action: int, address: int, size: int, stream: int, pool: int) -> None:
        for listener in self.listeners:
            listener(action, address, size, stream, pool)

    def follow_history(self) -> None:
        """Report events to the history while it wants them."""
        wanted = self.history.on or self.history.keep_stacks
        if wanted and self.history.on_event not in self.listeners:
            self.listeners.append(self.history.on_event)
        elif not wanted and self.history.on_event in self.listeners:
            self.listeners.remove(self.history.on_event)

    # -- memory

    def malloc(self, nbytes: int, stream: int = 0) -> PoolBlock:
        """A block of at least ``nbytes`` (> 0) for work on ``stream``. Raises
        torch.OutOfMemoryError where the device is full, with torch's own wording.
        """
        bound = self.bound
        if bound is not None and self.beyond is not None and self.sim.allocated + nbytes > bound:
            raise self.beyond(bound)
        with self._lock:
            self._busy = True
            try:
                block = self.sim.malloc(nbytes, stream, self.sim.pool_of(stream))
            finally:
                self._busy = False
            self._drain()
        if block is None:
            raise torch.OutOfMemoryError(self._out_of_memory(nbytes))
        return block

    def free(self, block: PoolBlock) -> None:
        """Give a block back. Never raises for a block that `malloc` gave, once."""
        with self._lock:
            if self._busy:  # called by the garbage collector while the allocator runs
                self._waiting.append(block)
                return
            self._free(block)
            self._drain()

    def _free(self, block: PoolBlock) -> None:
        self._busy = True
        uses = block.stream_uses
        try:
            self.sim.free(block)
            for stream in uses or ():
                if stream not in self.busy_streams:  # its event is done as soon as it is recorded
                    self.sim.finish(stream)
        finally:
            self._busy = False

    def _drain(self) -> None:
        while self._waiting:
            self._free(self._waiting.popleft())

    def record_stream(self, block: PoolBlock, stream: int) -> None:
        """Another stream uses the block: it is not given to anyone until that work is done."""
        with self._lock:
            self.sim.record_stream(block, stream)

    def finish(self, stream: int, *, idle: bool = True) -> None:
        """Work queued on ``stream`` is done, as the host waited for it. ``idle``: all of it."""
        with self._lock:
            self.sim.finish(stream)
            if idle:
                self.busy_streams.discard(stream)

    def empty_cache(self) -> None:
        with self._lock:
            self._busy = True
            try:
                self.sim.empty_cache()
            finally:
                self._busy = False
            self.busy_streams.clear()  # ``cudaFree`` waits for the device
            self._drain()

    def workspace(self, key: tuple[Any, ...], nbytes: int, stream: int, name: str) -> None:
        """A library's buffer that is allocated at its first use and then kept. ``name`` is what
        a history shows as the innermost frame.
        """
        if nbytes and key not in self.workspaces:
            self.history.library = name
            try:
                self.workspaces[key] = self.malloc(nbytes, stream)
            finally:
                self.history.library = ""

    def clear_workspaces(self) -> None:
        """``torch._C._cuda_clearCublasWorkspaces``."""
        blocks = list(self.workspaces.values())
        self.workspaces.clear()
        for block in blocks:
            self.free(block)

    # -- figures

    @property
    def available(self) -> float:
        """Bytes that tensors could still get if nothing were cached and no byte lost to
        rounding: what is asked for beyond that is refused. Infinite on an endless device.
        """
        capacity = self.driver.capacity
        if capacity is None:
            return math.inf if self.bound is None else self.bound - self.sim.allocated
        allowed = self.sim.allowed_maximum
        most = capacity if allowed is None else min(capacity, allowed)
        return most - self.sim.allocated

    @property
    def total(self) -> int:
        """Bytes of memory, as ``get_device_properties(i).total_memory``."""
        return self.model.total_memory

    @property
    def free_memory(self) -> int:
        """Bytes that ``cudaMemGetInfo`` calls free: not reserved, not the context's."""
        return self.total - self.context - self.sim.reserved

    def _out_of_memory(self, nbytes: int) -> str:
        sim = self.sim
        used = self.context + sim.reserved
        fraction = memory_fraction(self.settings)
        allowed = ""
        if fraction < 1.0:
            allowed = f"{_size(int(fraction * self.total))} allowed; "
        return (
            f"CUDA out of memory. Tried to allocate {_size(nbytes)}. GPU {self.index} has "
            f"a total capacity of {_size(self.total)} of which "
            f"{_size(self.free_memory)} is free. Including non-PyTorch memory, this process "
            f"has {_size(used)} memory in use. {allowed}Of the allocated memory "
            f"{_size(sim.allocated)} is allocated by PyTorch, and "
            f"{_size(sim.reserved - sim.allocated)} is reserved by PyTorch but unallocated. "
            "If reserved but unallocated memory is large try setting "
            "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation.  See "
            "documentation for Memory Management  "
            "(https://pytorch.org/docs/stable/notes/cuda.html#environment-variables)"
        )


def _size(count: int) -> str:
    """Bytes in torch's own wording (``format_size`` in CUDACachingAllocator.cpp)."""
    if count <= 1024:
        return f"{count} bytes"
    for unit, limit in (("KiB", 1 << 20), ("MiB", 1 << 30)):
        if count <= limit:
            return f"{count / (limit >> 10):.2f} {unit}"
    return f"{count / (1 << 30):.2f} GiB"
