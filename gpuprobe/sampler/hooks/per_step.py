"""What a step's record holds besides memory and time: collectives, and where things are."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from gpuprobe.analysis.time_shares import joined_calls
from gpuprobe.model.run.session import BlindSpot, Collective, Placed
from gpuprobe.sampler.hooks.collectives import CollectiveCalls
from gpuprobe.sampler.hooks.placement import Placement


class PerStep:
    """Both, of one recorder. A second record of a step (`Step`) has what the first had, too."""

    def __init__(self, blind: Callable[[BlindSpot], None]) -> None:
        self.collectives = CollectiveCalls(blind)
        self.placement = Placement()
        self._last: tuple[int, tuple[Collective, ...], tuple[Placed, ...]] = (-1, (), ())

    def take(
        self, index: int, models: Iterable[Any]
    ) -> tuple[tuple[Collective, ...], tuple[Placed, ...]]:
        """Everything since the last time, for the step ``index`` that ends now."""
        calls = self.collectives.take()
        placed = self.placement.take(models) if self.placement.wanted else ()
        before, earlier, placed_earlier = self._last
        if before == index:
            calls = joined_calls((*earlier, *calls))
            placed = placed or placed_earlier
        self._last = (index, calls, placed)
        return calls, placed
