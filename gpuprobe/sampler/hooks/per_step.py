"""What a step's record holds besides memory and time: collectives, and where things are."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from gpuprobe.analysis.time_shares import joined_calls
from gpuprobe.model.run.communication import MOST_OPERATIONS, exchanges_of, operations
from gpuprobe.model.run.launches import NOT_COUNTED, StepLaunches, joined
from gpuprobe.model.run.session import BlindSpot
from gpuprobe.model.values import Unavailable
from gpuprobe.sampler.hooks.distributed.collectives import CollectiveCalls
from gpuprobe.sampler.hooks.distributed.records import Records
from gpuprobe.sampler.hooks.distributed.waits import joined_waits
from gpuprobe.sampler.hooks.placement import Placement
from gpuprobe.sampler.timeline import PhaseTimeline
from gpuprobe.sampler.tracing.traces import Traces
from gpuprobe.torch_support import assumptions

_LEFT_OUT = BlindSpot(
    f"operations with other ranks after the first {MOST_OPERATIONS:,} of a step",
    "communication by line and module does not include them; the totals by operation do",
)

_IF = "the figures are those of a real GPU if this is so there"


class PerStep:
    """Both, of one recorder. A second record of a step (`Step`) has what the first had, too."""

    def __init__(
        self,
        blind: Callable[[tuple[BlindSpot, ...]], None],
        timeline: PhaseTimeline,
        traces: Traces,
        on_fault: Callable[[Exception], None],
    ) -> None:
        """``traces`` know which steps are recorded with each operation; ``on_fault`` gets what goes
        wrong here.
        """
        self.records = Records(lambda: timeline.started_ns, on_fault)
        self.records.on = traces.in_detail(0)
        self._traces = traces
        self._blind = blind
        self._complete = True
        self.collectives = CollectiveCalls(
            lambda spot: blind((spot,)), lambda: timeline.path, self.records
        )
        self.placement = Placement()
        self._last: tuple[int, dict[str, Any]] = (-1, {})  # the step, and what it had

    def take(self, index: int, models: Iterable[Any], optimizers: Iterable[Any]) -> dict[str, Any]:
        """Everything since the last time, for the step ``index`` that ends now, as `assemble` takes
        it."""
        found: dict[str, Any] = {
            "collectives": self.collectives.take(),
            "placement": self.placement.take(models, optimizers),
            "waited": self.collectives.waits.take(),
            "copied": self.collectives.copies.take(),
            "exchanges": exchanges_of(self.records.take()),
            "launches": self._launches(),
        }
        self.records.on = self._traces.in_detail(index + 1)
        before, earlier = self._last
        if before == index:
            found = self._joined(earlier, found)
        if self.records.left_out and self._complete:
            self._complete = False
            self._blind((_LEFT_OUT,))
        self._last = (index, found)
        return found

    def _launches(self) -> StepLaunches | Unavailable:
        trace = self._traces.launches
        found = None if trace is None else trace.take()
        return NOT_COUNTED if found is None else found

    def end(self) -> None:
        """Take the hooks out, and record what a virtual GPU has taken for granted."""
        self.collectives.remove()
        self._blind(tuple(BlindSpot(f"assumed: {text}", _IF) for text in assumptions.in_force()))

    def _joined(self, earlier: dict[str, Any], later: dict[str, Any]) -> dict[str, Any]:
        exchanges = (*earlier["exchanges"], *later["exchanges"])
        if operations(exchanges) > MOST_OPERATIONS:
            exchanges, self.records.left_out = earlier["exchanges"], True
        return {
            "collectives": joined_calls((*earlier["collectives"], *later["collectives"])),
            "placement": later["placement"] or earlier["placement"],
            "waited": joined_waits(earlier["waited"], later["waited"]),
            "copied": joined_waits(earlier["copied"], later["copied"]),
            "exchanges": exchanges,
            "launches": joined(earlier["launches"], later["launches"]),
        }
