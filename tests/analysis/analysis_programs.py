"""Traces with known answers: random programs on the allocator simulator, and hand-made ones."""

from __future__ import annotations

import random
from dataclasses import dataclass

from streamed_simulator import StreamedSimulator
from trace_recorder import TraceRecorder

from gpuprobe.allocator.blocks import PoolBlock
from gpuprobe.allocator.driver import SimulatedDriver
from gpuprobe.model.memory import Category, Segment, TraceAction
from gpuprobe.model.trace import AllocatorSettings, EventColumns, Frame, MemoryTrace

MIB = 1 << 20
ALLOC = TraceAction.ALLOC.code
REQUESTED = TraceAction.FREE_REQUESTED.code
COMPLETED = TraceAction.FREE_COMPLETED.code
POOLS = [(0, 0), (0, 1)]

SETTINGS = {
    "default": AllocatorSettings(),
    "expandable": AllocatorSettings(expandable_segments=True),
    "max_split": AllocatorSettings(max_split_size=24 * MIB),
    "roundup": AllocatorSettings(roundup_power2_divisions={1 << i: 4 for i in range(16)}),
}


@dataclass
class Mark:
    """The simulator's own totals after ``events`` events."""

    events: int
    allocated: int
    active: int
    reserved: int
    segments: tuple[Segment, ...]


def recorded(seed: int, settings: AllocatorSettings, steps: int) -> tuple[MemoryTrace, list[Mark]]:
    """Run a random program with three streams; its trace, and a mark after every request."""
    rng = random.Random(seed)
    sim = StreamedSimulator(settings, SimulatedDriver(None, "ascending"))
    recorder = TraceRecorder(sim, POOLS)
    held: list[PoolBlock] = []
    marks = []
    for _ in range(steps):
        roll = rng.random()
        if roll < 0.52 or not held:
            size = rng.choice((rng.randrange(1, MIB), rng.randrange(MIB, 60 * MIB)))
            block = sim.malloc(size, rng.choice((0, 0, 7)))
            assert block is not None
            held.append(block)
        elif roll < 0.9:
            sim.free(held.pop(rng.randrange(len(held))))
        elif roll < 0.94:
            sim.record_stream(rng.choice(held), 9)
        elif roll < 0.97:
            sim.finish(9)
        else:
            sim.empty_cache()
        trace = recorder.trace()
        marks.append(
            Mark(len(trace.events), sim.allocated, sim.active, sim.reserved, trace.segments)
        )
    return recorder.trace(), marks


def cut(trace: MemoryTrace, start: int) -> MemoryTrace:
    """The trace of a recorder that was switched on ``start`` events later."""
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


def layout(segments: tuple[Segment, ...]) -> list[object]:
    """The compared properties of segments."""
    return [
        (
            s.address,
            s.total_size,
            s.stream,
            s.segment_type,
            s.pool_id,
            [(b.address, b.size, b.state, b.requested_size) for b in s.blocks],
        )
        for s in sorted(segments, key=lambda s: s.address)
    ]


class Script:
    """A trace written by hand, one request per line; sizes are exact (no allocator)."""

    def __init__(self, device: str = "cpu", step: int | None = None) -> None:
        self.trace = MemoryTrace(device=device, step=step)
        self._next = 0x1000
        self._clock = 1000

    def stack(self, *frames: tuple[str, int, str]) -> int:
        """A stack of (file, line, function), innermost first."""
        table = self.trace.stacks
        return table.stack(tuple(table.frame(Frame(*frame)) for frame in frames))

    def before(self, size: int, *, address: int = 0, **given: int | str) -> int:
        """Memory alive before the trace."""
        address = address or self._address(size)
        self.trace.baseline.append(ALLOC, address, size, **self._ids(given))
        return address

    def alloc(self, size: int, *, address: int = 0, **given: int | str) -> int:
        address = address or self._address(size)
        self._clock += 1
        self.trace.events.append(ALLOC, address, size, 0, self._clock, **self._ids(given))
        return address

    def free(self, address: int, size: int = 0, both: bool = True, **given: int | str) -> None:
        self._clock += 1
        if both:
            self.trace.events.append(REQUESTED, address, size, 0, self._clock, **self._ids(given))
        self.trace.events.append(COMPLETED, address, size, 0, self._clock, **self._ids(given))

    def tick(self) -> int:
        """A new time in µs."""
        self._clock += 1
        return self._clock

    def _address(self, size: int) -> int:
        address, self._next = self._next, self._next + size + 512
        return address

    def _ids(self, given: dict[str, int | str]) -> dict[str, int]:
        """Replace names by indices of the string table, and categories by codes."""
        table = self.trace.stacks
        ids = {}
        for name, value in given.items():
            if isinstance(value, Category):
                ids[name] = value.code
            else:
                ids[name] = table.string(value) if isinstance(value, str) else value
        return ids
