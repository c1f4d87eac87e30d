"""A simulator's run as a `MemoryTrace`: the events that torch would record, in the same order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from gpuprobe.allocator.driver import SimulatedDriver
from gpuprobe.allocator.layout import segments
from gpuprobe.allocator.simulator import Simulator
from gpuprobe.model.memory import TraceAction
from gpuprobe.model.trace import EventColumns, MemoryTrace

_OOM: Final = TraceAction.OOM.code


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

    def trace(self, device: str = "cuda:0") -> MemoryTrace:
        """The trace so far, with the present layout."""
        return MemoryTrace(
            device=device,
            events=self.events,
            pools=list(self.pools),
            segments=segments(self.sim, self.pools),
            settings=self.sim.settings,
        )
