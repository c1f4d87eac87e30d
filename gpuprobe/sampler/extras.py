"""What a step's record holds besides memory and time: collectives, and where things are."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from gpuprobe.analysis.time_shares import joined_calls
from gpuprobe.model.session import BlindSpot, Collective, Placed, Step
from gpuprobe.sampler.collectives import Collectives
from gpuprobe.sampler.placement import Placement

__all__ = ["Extras"]


class Extras:
    """Both, of one recorder. A second record of a step (`Step`) has what the first had, too."""

    def __init__(self, blind: Callable[[BlindSpot], None]) -> None:
        self.collectives = Collectives(blind)
        self.placement = Placement()
        self._last: tuple[int, tuple[Collective, ...], tuple[Placed, ...]] = (-1, (), ())

    def add_to(self, step: Step, models: Iterable[Any]) -> Step:
        """The step with everything since the last one."""
        calls = self.collectives.take()
        placed = self.placement.take(models) if self.placement.wanted else ()
        index, earlier, placed_earlier = self._last
        if index == step.index:
            calls = joined_calls((*earlier, *calls))
            placed = placed or placed_earlier
        self._last = (step.index, calls, placed)
        if not calls and not placed:
            return step
        return replace(step, collectives=calls, placement=placed)
