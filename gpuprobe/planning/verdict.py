"""Whether a run fits, and why not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

from gpuprobe.allocator.replays.whatif import WhatIfOutcome
from gpuprobe.model.plans.estimate import FITS, NOT, RELEASING, WITHIN_MARGIN
from gpuprobe.model.text import human_bytes

MARGIN: Final = 0.02
"""Of the reserved memory: what the estimate may be off by where nothing else is known. Twice the
worst error that the project's accuracy goal allows."""


class Need(NamedTuple):
    """What a run needs of a GPU with ``capacity`` bytes. ``low`` to ``high`` is the reserved
    memory, as simulated without limit and as it is printed, ``simulated`` its upper end before it
    was widened; ``outside_low`` to ``outside_high`` the memory of the CUDA context and of NCCL.
    """

    capacity: int
    allocated: int
    simulated: int
    low: int
    high: int
    outside_low: int
    outside_high: int


def verdict_of(need: Need, within: Callable[[int], WhatIfOutcome]) -> tuple[str, str]:
    """The verdict, and the sentence why it is not `FITS` ("" if it is).

    ``within`` simulates the run with that many bytes for the allocator, which releases cached
    memory before it fails, as torch does. It is `FITS` only if the whole printed range is within
    the capacity.
    """
    capacity = human_bytes(need.capacity)
    reserved = max(need.high, round(need.simulated * (1 + MARGIN)))
    if reserved + need.outside_high <= need.capacity:
        return FITS, ""
    best = within(need.capacity - need.outside_low)
    if best.would_oom == best.orders:
        return NOT, (
            f"with {capacity} an allocation fails in all {best.orders} simulations, also after all "
            "cached memory was released"
        )
    worst = within(need.capacity - need.outside_high)
    if worst.would_oom:
        return WITHIN_MARGIN, (
            f"with {capacity} an allocation fails in {worst.would_oom} of {worst.orders} "
            "simulations, which differ in the addresses that the driver returns"
        )
    tight = round(need.allocated * (1 + MARGIN)) + need.outside_high
    if tight > need.capacity:
        return WITHIN_MARGIN, (
            f"tensors, CUDA context and a margin of {MARGIN:.0%} need {human_bytes(tight)} of "
            f"{capacity}, without any cached memory"
        )
    if need.low + need.outside_low > need.capacity:
        calls = worst.retries.most
        times = "once" if calls == 1 else f"{calls} times"
        return RELEASING, (
            f"torch reserves more than {capacity} if it can; with less it releases cached memory "
            f"and allocates again ({times} in the simulation), which is slow, and fails if memory "
            "is more fragmented than simulated"
        )
    if need.high + need.outside_high > need.capacity:
        return WITHIN_MARGIN, (
            f"the upper end of the range is above {capacity}; torch then has to release cached "
            "memory"
        )
    return FITS, ""
