"""Whether a run fits on a GPU: the verdict of an estimate, and two faster answers that are based on
an estimate made before. `explain` needs none of them: it compares what the program allocated with
the GPU's memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from gpuprobe.model.plans.estimate import FITS, MARGIN, NOT, RELEASING, WITHIN_MARGIN, Estimate
from gpuprobe.model.text import human_bytes

if TYPE_CHECKING:
    from gpuprobe.allocator.whatif import WhatIfOutcome
    from gpuprobe.catalogue.gpu_model import GpuModel


class NeededMemory(NamedTuple):
    """The memory that a run needs on a GPU with ``capacity`` bytes. ``low`` to ``high`` is the
    printed range of reserved memory, as simulated without a limit, ``simulated`` its upper end
    before it was widened; ``outside_low`` to ``outside_high`` is the memory of the CUDA context, of
    NCCL and of the processes that the program starts.
    """

    capacity: int
    allocated: int
    simulated: int
    low: int
    high: int
    outside_low: int
    outside_high: int


def verdict_of(need: NeededMemory, within: Callable[[int], WhatIfOutcome]) -> tuple[str, str]:
    """The verdict, and a sentence that explains it ("" for `FITS`).

    ``within`` simulates the run with a limit in bytes for the allocator, which releases cached
    memory before it fails, as torch does. The verdict is `FITS` only if the whole printed range is
    within the capacity.
    """
    capacity = human_bytes(need.capacity)
    reserved = max(need.high, round(need.simulated * (1 + MARGIN)))
    if reserved + need.outside_high <= need.capacity:
        return FITS, ""
    best = within(need.capacity - need.outside_low)
    if best.would_oom == best.orders:
        return NOT, (
            f"it runs out of memory with {capacity}, also after torch has released all cached "
            "memory"
        )
    worst = within(need.capacity - need.outside_high)
    if worst.would_oom:
        return WITHIN_MARGIN, (
            f"with {capacity} it depends on the addresses that the driver returns: of "
            f"{worst.orders} simulations with different ones, {worst.would_oom} run out of memory"
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
            f"torch would reserve more than {capacity}. To run it must return cached memory to the "
            f"driver and allocate again ({times} in the simulation), which is slow, and fails if "
            "memory is more fragmented than simulated"
        )
    if need.high + need.outside_high > need.capacity:
        return WITHIN_MARGIN, (
            f"the upper end of the range is above {capacity}; torch then has to release cached "
            "memory"
        )
    return FITS, ""


def usual_room(capacity: int) -> int:
    """The largest need in bytes that usually fits: the capacity without the margin."""
    return int(capacity / (1 + MARGIN))


def need_on(estimate: Estimate, model: GpuModel) -> int:
    """The need in bytes of an estimated run on another GPU, with the margin of a verdict: the run
    usually fits there if that has as much memory.
    """
    reserved = round(estimate.reserved_high * (1 + MARGIN))
    return reserved + model.context_high + estimate.nccl_high + estimate.processes_high
