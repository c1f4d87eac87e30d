"""What a step's record holds besides memory and time: collectives, and where things are."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from gpuprobe.model.session import BlindSpot, Collective, Placed, Step
from gpuprobe.model.values import Bytes, Unavailable
from gpuprobe.sampler.collectives import Collectives
from gpuprobe.sampler.placement import Placement

__all__ = ["Extras", "joined"]


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
            calls = joined(earlier, calls)
            placed = placed or placed_earlier
        self._last = (step.index, calls, placed)
        if not calls and not placed:
            return step
        return replace(step, collectives=calls, placement=placed)


def joined(one: Iterable[Collective], two: Iterable[Collective]) -> tuple[Collective, ...]:
    """The calls of both, by operation, the most bytes first."""
    sums: dict[str, Collective] = {}
    for call in (*one, *two):
        before = sums.get(call.op)
        if before is None:
            sums[call.op] = call
            continue
        times = (before.host_ns, call.host_ns)
        spent: int | Unavailable = 0
        for part in times:
            if isinstance(part, Unavailable) or isinstance(spent, Unavailable):
                spent = part if isinstance(part, Unavailable) else spent
            else:
                spent += part
        sums[call.op] = Collective(
            call.op, before.count + call.count, Bytes(before.bytes + call.bytes), spent
        )
    return tuple(sorted(sums.values(), key=lambda call: (-call.bytes, call.op)))
