"""What the requests of a trace reserve in an allocator that has nothing else."""

from __future__ import annotations

from gpuprobe.allocator.blocks import PoolBlock
from gpuprobe.allocator.driver import SimulatedDriver
from gpuprobe.allocator.replays.replay import event_pools
from gpuprobe.allocator.replays.whatif import request
from gpuprobe.allocator.simulator import Simulator
from gpuprobe.model.memory import TraceAction
from gpuprobe.model.trace import AllocatorSettings, MemoryTrace


def reserved_alone(trace: MemoryTrace) -> int:
    """The most that is reserved, in bytes: what was alive before the trace is allocated first, the
    lowest address first, then come the events."""
    sim = Simulator(trace.settings or AllocatorSettings(), SimulatedDriver())
    live: dict[int, PoolBlock] = {}

    def made(address: int, size: int, stream: int, pool: int) -> None:
        block = request(sim, size, stream, pool)
        if block is not None:
            live[address] = block

    before, events = trace.baseline, trace.events
    old = zip(
        before.address, before.size, before.column("stream"), before.column("pool"), strict=True
    )
    for row in sorted(old):
        made(*row)
    rows = zip(
        events.action,
        events.address,
        events.size,
        events.column("stream"),
        event_pools(trace),
        strict=True,
    )
    for code, address, size, stream, pool in rows:
        if code == TraceAction.ALLOC.code:
            made(address, size, stream, pool)
        elif code == TraceAction.FREE_COMPLETED.code:
            block = live.pop(address, None)
            if block is not None:
                sim.free(block)
    return sim.peak_reserved
