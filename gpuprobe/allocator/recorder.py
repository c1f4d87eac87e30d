"""A simulator's run as a `MemoryTrace`: the events that torch would record, in the same order."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final, NamedTuple

from gpuprobe.allocator.driver import SimulatedDriver
from gpuprobe.allocator.layout import segments
from gpuprobe.allocator.simulator import Simulator
from gpuprobe.model.memory import TraceAction
from gpuprobe.model.trace import COLUMNS, EventColumns, MemoryTrace

if TYPE_CHECKING:
    from gpuprobe.allocator.replay import TraceReplay

_OOM: Final = TraceAction.OOM.code


class Request(NamedTuple):
    """``size`` bytes, allocated before the event ``at`` of a trace and freed at once."""

    at: int
    size: int
    stream: int
    pool: int


class TraceRecorder:
    """Records the events of a simulator.

    ``pools`` gives the torch pool id of each pool index. Events have no times: a simulation has
    no clock. Without ``listen`` the caller passes the simulator's events to `on_event`.
    """

    def __init__(
        self, sim: Simulator, pools: Sequence[tuple[int, int]] = ((0, 0),), *, listen: bool = True
    ) -> None:
        self.sim = sim
        self.events = EventColumns()
        self.pools = list(pools)
        self.requests: list[Request] = []
        if listen:
            sim.listener = self.on_event

    def on_event(self, action: int, address: int, size: int, stream: int, pool: int) -> None:
        """Record one event of the simulator."""
        events = self.events
        events.action.append(action)
        events.address.append(address)
        events.size.append(size)
        events.stream.append(stream)
        events.pool.append(pool)
        free = 0
        if action == _OOM:
            driver = self.sim.driver
            if isinstance(driver, SimulatedDriver) and driver.capacity is not None:
                free = driver.capacity - driver.used
        events.device_free.append(free)

    def on_request(self, size: int, stream: int) -> None:
        """Record memory that code outside the simulation may allocate now, and free again."""
        self.requests.append(Request(len(self.events), size, stream, self.sim.pool_of(stream)))

    def trace(self, device: str = "cuda:0") -> MemoryTrace:
        """The trace so far, with the present layout."""
        return MemoryTrace(
            device=device,
            events=self.events,
            pools=list(self.pools),
            segments=segments(self.sim, self.pools),
            settings=self.sim.settings,
        )


def with_requests(
    trace: MemoryTrace, recorded: TraceReplay, requests: Sequence[Request]
) -> tuple[MemoryTrace, TraceReplay]:
    """The trace and its replay with ``requests`` inserted, as arguments of `what_if`.

    They are inserted as requests that failed, which a what-if serves if it can, and frees at once.
    """
    requests = sorted(requests, key=lambda request: request.at)
    events, old = EventColumns(), trace.events
    for name in COLUMNS:
        column, former = getattr(events, name), getattr(old, name)
        if not len(former):
            continue
        start = 0
        for request in requests:
            column.extend(former[start : request.at])
            column.append(_OOM if name == "action" else getattr(request, name, 0))
            start = request.at
        column.extend(former[start:])
    places = [request.at for request in requests]

    def moved(index: int) -> int:
        return index + bisect_right(places, index)

    return replace(trace, events=events), replace(
        recorded,
        flushes=tuple(map(moved, recorded.flushes)),
        unclear=tuple(replace(one, event=moved(one.event)) for one in recorded.unclear),
        overflows=tuple(replace(one, event=moved(one.event)) for one in recorded.overflows),
        held={pool: moved(event) for pool, event in recorded.held.items()},
    )
