"""A trace's requests with other times and sizes, served by the caching allocator.

A block of the large pool may be up to 1 MiB larger than its request, as a smaller remainder is not
split off. Which blocks are depends on what is free when they are requested: in a changed program,
on others. That is simulated, from the recorded layout before the first event.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from gpuprobe.allocator.blocks import PoolBlock
from gpuprobe.allocator.driver import SimulatedDriver
from gpuprobe.allocator.layout import load_layout
from gpuprobe.allocator.replay import event_pools
from gpuprobe.allocator.simulator import Simulator
from gpuprobe.allocator.start_state import start_state
from gpuprobe.errors import DataError
from gpuprobe.model.actions import OOM, SEGMENT_FREE, SEGMENT_UNMAP
from gpuprobe.model.io.files import gc_paused
from gpuprobe.model.trace import AllocatorSettings, MemoryTrace


class Request(NamedTuple):
    """Memory that a program requests: ``size`` bytes, by the event ``start`` (-1: before the trace,
    when it lay at ``address``). At ``freed`` its owner frees it, at ``done`` no stream uses it
    either (-1: before the trace; the number of events: not in it).
    """

    start: int
    freed: int
    done: int
    size: int
    stream: int
    address: int


def most_allocated(trace: MemoryTrace, requests: Iterable[Request]) -> int | None:
    """The most allocated bytes of a trace if these are its requests; None if they cannot be
    simulated: memory ran out or was released, there are private pools, or the layout before the
    first event is unknown. Blocks of expandable segments are as large as requests, rounded: they
    are not simulated, either.
    """
    settings = trace.settings or AllocatorSettings()
    if settings.expandable_segments:
        return None
    if {OOM, SEGMENT_FREE, SEGMENT_UNMAP}.intersection(trace.events.action):
        return None
    if any(event_pools(trace)) or any(one.pool_id != (0, 0) for one in trace.segments):
        return None
    with gc_paused():
        state = start_state(trace, settings)
        lowest = min((one.address for one in state.segments), default=None)
        driver = SimulatedDriver() if lowest is None else SimulatedDriver(end=lowest)
        sim = Simulator(settings, driver)
        try:
            load_layout(sim, state.segments, state.ranges)
        except DataError:  # a damaged trace: it is not simulated
            return None
        if state.unplaced:
            return None
        return _run(sim, requests)


_FREE, _COMPLETE, _ALLOCATE = range(3)
"""What happens at one event, in this order."""


def _run(sim: Simulator, requests: Iterable[Request]) -> int | None:
    every = [*requests]
    blocks = _before(sim, every)
    if blocks is None:
        return None
    todo: list[tuple[int, int, int]] = []
    for number, (start, freed, done, *_) in enumerate(every):
        if start >= 0:
            todo.append((start, _ALLOCATE, number))
        todo += [(freed, _FREE, number), (done, _COMPLETE, number)]
    todo.sort()
    for _, action, number in todo:
        if action == _ALLOCATE:
            block = sim.malloc(every[number].size, every[number].stream)
            if block is None:
                return None
            blocks[number] = block
        elif action == _COMPLETE:
            sim.complete(blocks[number])
        elif blocks[number].allocated:
            sim.request_free(blocks[number])
    return sim.peak_allocated


def _before(sim: Simulator, requests: Sequence[Request]) -> dict[int, PoolBlock] | None:
    """The blocks from before the trace, by the number of their request: others are freed, and those
    of another size are requested again. None if one is not in the layout.
    """
    numbers = {one.address: number for number, one in enumerate(requests) if one.start < 0}
    if not numbers.keys() <= sim.live.keys():
        return None
    smaller = []
    for address, block in [*sim.live.items()]:
        number = numbers.get(address)
        if number is None or requests[number].size != block.requested:
            if block.allocated:
                sim.request_free(block)
            sim.complete(block)
            smaller += [] if number is None else [number]
    blocks = {number: sim.live[at] for at, number in numbers.items() if number not in smaller}
    for number in smaller:
        made = sim.malloc(requests[number].size, requests[number].stream)
        if made is None:
            return None
        blocks[number] = made
    sim.peak_allocated = sim.allocated
    return blocks
