"""What a step's record holds besides memory and time: collectives, and where things are."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from gpuprobe.analysis.time_shares import joined_calls
from gpuprobe.model.run.session import BlindSpot, Collective, Placed
from gpuprobe.sampler.hooks.distributed.collectives import CollectiveCalls
from gpuprobe.sampler.hooks.distributed.waits import Waited, joined_waits
from gpuprobe.sampler.hooks.placement import Placement


class PerStep:
    """Both, of one recorder. A second record of a step (`Step`) has what the first had, too."""

    def __init__(self, blind: Callable[[BlindSpot], None], phase: Callable[[], str]) -> None:
        """``phase`` returns the path of the phase that is on."""
        self.collectives = CollectiveCalls(blind, phase)
        self.placement = Placement()
        none: tuple[tuple[Collective, ...], tuple[Placed, ...], Waited] = ((), (), {})
        self._last = (-1, *none)

    def take(self, index: int, models: Iterable[Any]) -> dict[str, Any]:
        """Everything since the last time, for the step ``index`` that ends now, as `assemble` takes
        it."""
        calls = self.collectives.take()
        placed = self.placement.take(models) if self.placement.wanted else ()
        waited = self.collectives.waits.take()
        before, earlier, placed_earlier, waited_earlier = self._last
        if before == index:
            calls = joined_calls((*earlier, *calls))
            placed = placed or placed_earlier
            waited = joined_waits(waited_earlier, waited)
        self._last = (index, calls, placed, waited)
        return {"collectives": calls, "placement": placed, "waited": waited}
