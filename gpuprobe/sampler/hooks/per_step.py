"""What a step's record holds besides memory and time: collectives, and where things are."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from gpuprobe.analysis.time_shares import joined_calls
from gpuprobe.model.run.communication import MOST_OPERATIONS, Exchange, exchanges_of, operations
from gpuprobe.model.run.session import BlindSpot, Collective, Placed
from gpuprobe.sampler.hooks.distributed.collectives import CollectiveCalls
from gpuprobe.sampler.hooks.distributed.records import Records
from gpuprobe.sampler.hooks.distributed.waits import Waited, joined_waits
from gpuprobe.sampler.hooks.placement import Placement
from gpuprobe.sampler.timeline import PhaseTimeline
from gpuprobe.sampler.tracing.traces import Traces

_LEFT_OUT = BlindSpot(
    f"operations with other ranks after the first {MOST_OPERATIONS:,} of a step",
    "communication by line and module does not include them; the totals by operation do",
)


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
        self._detailed = traces.in_detail
        self._blind = blind
        self._complete = True
        self.collectives = CollectiveCalls(
            lambda spot: blind((spot,)), lambda: timeline.path, self.records
        )
        self.placement = Placement()
        none: tuple[tuple[Collective, ...], tuple[Placed, ...], Waited, tuple[Exchange, ...]] = (
            (),
            (),
            {},
            (),
        )
        self._last = (-1, *none)
        self._copied: Waited = {}  # in the last step

    def take(self, index: int, models: Iterable[Any]) -> dict[str, Any]:
        """Everything since the last time, for the step ``index`` that ends now, as `assemble` takes
        it."""
        calls = self.collectives.take()
        placed = self.placement.take(models) if self.placement.wanted else ()
        waited = self.collectives.waits.take()
        copied: Waited = {**self.collectives.copies.take()}
        exchanges = exchanges_of(self.records.take())
        self.records.on = self._detailed(index + 1)
        before, earlier, placed_earlier, waited_earlier, exchanges_earlier = self._last
        if before == index:
            calls = joined_calls((*earlier, *calls))
            placed = placed or placed_earlier
            waited = joined_waits(waited_earlier, waited)
            copied = joined_waits(self._copied, copied)
            if operations(exchanges_earlier) + operations(exchanges) <= MOST_OPERATIONS:
                exchanges = (*exchanges_earlier, *exchanges)
            else:
                exchanges, self.records.left_out = exchanges_earlier, True
        if self.records.left_out and self._complete:
            self._complete = False
            self._blind((_LEFT_OUT,))
        self._last = (index, calls, placed, waited, exchanges)
        self._copied = copied
        return {
            "collectives": calls,
            "placement": placed,
            "waited": waited,
            "copied": copied,
            "exchanges": exchanges,
        }
