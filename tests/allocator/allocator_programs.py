"""Random programs for the allocator: the same seed gives the same program."""

from __future__ import annotations

import random

from streamed_simulator import StreamedSimulator
from trace_recorder import TraceRecorder

from gpuprobe.allocator.blocks import PoolBlock, TieRule
from gpuprobe.allocator.driver import SimulatedDriver
from gpuprobe.allocator.simulator import Simulator
from gpuprobe.model.memory import Segment
from gpuprobe.model.trace import AllocatorSettings, EventColumns, MemoryTrace

MIB = 1 << 20
POOLS = [(0, 0), (0, 1), (1, 0)]
STREAMS = (0, 0x7F01, 0x7F02)


def random_size(rng: random.Random) -> int:
    """Sizes of every class: tiny, small, the 1-10 MiB class, large, and odd ones."""
    kind = rng.randrange(6)
    if kind == 0:
        return rng.randrange(1, 4096)
    if kind == 1:
        return rng.randrange(4096, MIB + 1)
    if kind == 2:
        return rng.randrange(MIB + 1, 10 * MIB)
    if kind == 3:
        return rng.randrange(10 * MIB, 80 * MIB)
    if kind == 4:
        return rng.choice((MIB, 2 * MIB, 10 * MIB, 20 * MIB, 30 * MIB))
    return rng.choice((512, 513, MIB - 1, MIB + 1, 3 * MIB, 5 * MIB, 9 * MIB))


def pool_of(sim: Simulator, stream: int) -> int:
    """The pool that serves an allocation on ``stream`` now, as torch's ``get_pool`` finds it: the
    last capture's.
    """
    for pool, streams in reversed(sim.captures):
        if streams is None or stream in streams:
            return pool
    return 0


class Program:
    """Drives a simulator through random requests and records what it does."""

    def __init__(
        self,
        seed: int,
        settings: AllocatorSettings,
        *,
        capacity: int | None = None,
        order: str = "ascending",
        captures: bool = False,
        tie_rule: TieRule = "address",
    ) -> None:
        self.rng = random.Random(seed)
        # Other processes hold most of the device, except where a share of it is the limit.
        self.device_memory = None
        if capacity is not None:
            self.device_memory = capacity * (8 if settings.expandable_segments else 1)
        self.sim = StreamedSimulator(
            settings,
            SimulatedDriver(capacity, order),
            device_memory=self.device_memory,
            tie_rule=tie_rule,
        )
        self.recorder = TraceRecorder(self.sim, POOLS)
        self.held: list[PoolBlock] = []
        self.captures = captures

    def run(self, steps: int) -> Program:
        for _ in range(steps):
            self.step()
        return self

    def step(self) -> None:
        rng, sim = self.rng, self.sim
        roll = rng.random()
        if roll < 0.5 or not self.held:
            stream = rng.choice(STREAMS[:2]) if rng.random() < 0.3 else 0
            block = sim.malloc(random_size(rng), stream, pool_of(sim, stream))
            if block is not None:
                self.held.append(block)
        elif roll < 0.90:
            sim.free(self.held.pop(rng.randrange(len(self.held))))
        elif roll < 0.94:
            sim.record_stream(rng.choice(self.held), rng.choice(STREAMS))
        elif roll < 0.97:
            sim.finish(rng.choice(STREAMS))
        elif roll < 0.98:
            sim.empty_cache()
        elif self.captures:
            if sim.captures:
                sim.end_capture(sim.captures[-1][0])
            elif rng.random() < 0.3 and 1 in sim.pools:
                sim.release_pool(1)
            else:
                sim.begin_capture(1, rng.choice((None, frozenset({0}))))

    def trace(self) -> MemoryTrace:
        return self.recorder.trace()


def cut(trace: MemoryTrace, start: int) -> MemoryTrace:
    """The trace without its first ``start`` events: what a recorder that was switched on
    later would have seen."""
    later = EventColumns()
    for name in ("action", "address", "size", "stream", "pool"):
        getattr(later, name).extend(getattr(trace.events, name)[start:])
    return MemoryTrace(
        device=trace.device,
        events=later,
        pools=trace.pools,
        segments=trace.segments,
        settings=trace.settings,
    )


def total(segments: tuple[Segment, ...]) -> int:
    return sum(s.total_size for s in segments)
