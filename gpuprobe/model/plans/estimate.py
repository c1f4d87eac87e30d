"""What a training step would need on a GPU that is not there."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Final

from gpuprobe.model.plans.step_time import NOT_PREDICTED, StepTime, TrainingCost, cost_of
from gpuprobe.model.run.communication import Transfer
from gpuprobe.model.text import human_bytes
from gpuprobe.model.values import (
    Bounds,
    Bytes,
    Count,
    Displayed,
    Matches,
    OneOf,
    Rank,
    Size,
    Unavailable,
    World,
)

MAY_NEED_MORE: Final = "was not run and may need more"
"""The end of an assumption about code of the program."""
FITS = "fits"
NOT = "does not fit"
WITHIN_MARGIN = "within the margin"
RELEASING = "does not fit without releasing cached memory"
VERDICTS = (FITS, NOT, WITHIN_MARGIN, RELEASING)
Verdict = Annotated[str, OneOf(VERDICTS)]
MODES = ("shapes", "real")
"""Of computing."""
SEVERITY = {FITS: 0, NOT: 2}
"""Of verdicts; 1 for the others."""

MARGIN = 0.02
"""The error of an estimate without a better bound, as a part of the reserved memory. Twice the
worst error that the project's accuracy goal allows."""

_NOTHING = Bytes(0)


@dataclass(frozen=True, slots=True)
class EstimateShare:
    """A part of the memory at the peak: a category, a module or a source line."""

    name: str
    bytes: Bytes


@dataclass(frozen=True, slots=True)
class PhasePeak:
    """The highest memory of one phase of the steps: ``forward``, ``evaluation`` and others."""

    phase: str
    allocated: Bytes


@dataclass(frozen=True, slots=True)
class EstimateCause:
    """Why memory is there that the run does not need. ``rule`` names the cause, ``saves`` is what
    the remedy saves, in words, with how that is known.
    """

    rule: str
    sentence: str
    remedy: str
    code: str
    saves: str


@dataclass(frozen=True, slots=True)
class DeviceEstimate:
    """What one of several GPUs of a process needs; see `Estimate`. ``device`` is its name in the
    process (``cuda:1``), ``by_category`` what is allocated at the peak of this GPU.
    """

    device: str
    gpu: str
    verdict: Verdict
    peak_allocated: Bytes
    peak_reserved: Bytes
    total_low: Size
    total_high: Size
    capacity: Bytes
    by_category: tuple[EstimateShare, ...] = ()


@dataclass(frozen=True, slots=True)
class RankEstimate:
    """What one rank of a job needs; see `Estimate`. ``alike`` are the ranks that behave like it,
    and itself, as in ``"0-7,64"``; "" if that was not determined.
    """

    rank: Rank
    verdict: Verdict
    peak_allocated: Bytes
    peak_reserved: Bytes
    total_low: Size
    total_high: Size
    alike: Annotated[str, Matches("^([0-9]+(-[0-9]+)?(,[0-9]+(-[0-9]+)?)*)?$")] = ""


@dataclass(frozen=True, slots=True)
class EstimatedChange:
    """An estimate of the run with a change. ``name`` is the change in a few words, ``how`` what to
    write; ``needed`` is the upper end of the run's memory with its context, in bytes. ``failed`` is
    why there is no estimate (``needed`` is then 0), or "".
    """

    name: str
    how: str
    verdict: Verdict
    needed: Bytes
    failed: str = ""

    @property
    def fits(self) -> bool:
        return not self.failed and self.verdict == FITS


@dataclass(frozen=True, slots=True)
class RoomyGpu:
    """A GPU of the catalogue that holds the run. ``needed`` is the upper end of the run's memory
    with its context on that GPU, in bytes: from an estimate there if ``estimated``, otherwise from
    the reserved memory of the estimate that this belongs to.
    """

    gpu: str
    capacity: Bytes
    needed: Bytes
    estimated: bool = False


def steps_until_full(free: int, growth: int) -> int:
    """About how many more steps fill ``free`` bytes, if each leaves ``growth`` behind."""
    return max(0, free) // growth + 1


@dataclass(frozen=True, slots=True)
class Estimate(Displayed):
    """The memory of a training run on a GPU that this machine does not have. Unit: bytes.

    A pair ``…_low``, ``…_high`` is a range. ``allocated_…`` and ``reserved_…`` are the peaks of the
    whole run with descending and with ascending addresses of segments; for one of several ranks
    ``reserved_…`` is 2% wider on both sides. ``context_…`` is the CUDA context with its libraries,
    from the catalogue; ``nccl_…`` the buffers of NCCL, by their default sizes; ``processes_…`` the
    ``processes`` that the program started and that use the GPU at one time, with contexts.

    ``verdict`` is `FITS` if the whole range is within the capacity, `WITHIN_MARGIN` if the
    capacity is in the range or free memory is less than the margin of error, `RELEASING` if the
    range is above the capacity and the run succeeds because the allocator releases cached memory,
    otherwise `NOT`. ``by_category``, ``by_module`` and ``by_line`` describe the highest traced
    moment: the peak, if ``attributed`` equals ``peak_allocated``. ``not_modelled`` lists memory
    that is not in the figures, ``compiled`` the graphs, graph breaks and recompilations of
    torch.compile. ``communication`` is what this rank sends in the last step.

    If there are rows in ``by_rank`` (several ranks were requested) or ``by_device`` (the process
    uses several GPUs), the other fields are about the one with the least free memory.
    """

    gpu: str
    devices: Annotated[int, Bounds(1)]
    steps: Count
    peak_allocated: Annotated[Bytes, "by tensors, with rounding"]
    peak_reserved: Annotated[Bytes, "held by the caching allocator"]
    reserved_low: Bytes
    reserved_high: Bytes
    context_low: Bytes
    context_high: Bytes
    capacity: Annotated[Bytes, "the GPU's whole memory"]
    verdict: Verdict
    attributed: Annotated[Bytes, "what each of the three tables sums to"]
    by_category: tuple[EstimateShare, ...]
    by_module: tuple[EstimateShare, ...]
    by_line: tuple[EstimateShare, ...]
    assumed: tuple[str, ...]
    not_modelled: tuple[str, ...]
    settings: Annotated[str, "of the caching allocator"] = ""
    ranks: World = 1
    compute: Annotated[str, OneOf(MODES), "real: all values were computed"] = "shapes"
    compute_why: Annotated[str, "the reason for it"] = ""
    compiled: tuple[str, ...] = ()
    communication: tuple[Transfer, ...] = ()
    rank: Rank = 0
    by_rank: tuple[RankEstimate, ...] = ()
    nccl_low: Bytes = _NOTHING
    nccl_high: Bytes = _NOTHING
    verdict_why: Annotated[str, 'the reason if it is not "fits"'] = ""
    by_device: Annotated[
        tuple[DeviceEstimate, ...],
        "each GPU of the process that is used, if there are several",
    ] = ()
    torch: Annotated[str, "the version of torch that ran, which the estimate is for"] = ""
    allocated_low: Bytes = _NOTHING
    allocated_high: Bytes = _NOTHING
    processes: Count = 0
    processes_low: Bytes = _NOTHING
    processes_high: Bytes = _NOTHING
    suggestions: Annotated[
        tuple[EstimatedChange, ...],
        "estimates of the run with a change, if it does not fit: those that fit first",
    ] = ()
    not_tried: Annotated[tuple[str, ...], "other changes, with the reason"] = ()
    smallest_gpus: Annotated[
        tuple[RoomyGpu, ...], "the smallest GPUs of the catalogue that hold the run as it is"
    ] = ()
    growth: Annotated[
        Bytes, "what the last step left allocated in addition to what it began with; 0: nothing"
    ] = _NOTHING
    growth_advice: Annotated[
        tuple[str, ...], "if memory grows: what to change, and the reasons, as sentences"
    ] = ()
    phases: Annotated[
        tuple[PhasePeak, ...], "the peak of each phase that ran, the highest first"
    ] = ()
    causes: Annotated[
        tuple[EstimateCause, ...], "memory that the run does not need, the most first"
    ] = ()
    model: Annotated[
        str, "with --model: the model and the choices for it, in words; otherwise empty"
    ] = ""
    step_time: Annotated[
        StepTime | Unavailable, "the predicted time of the last whole step on that GPU"
    ] = NOT_PREDICTED
    no_kernels: Annotated[
        str, "that this build of torch has no kernels for the GPU: nothing runs there"
    ] = ""
    cost: Annotated[
        TrainingCost | None, "with --price: of a step, of tokens, images or samples"
    ] = None

    def __repr__(self) -> str:
        several = f"{self.devices}x" if self.devices > 1 else ""
        low, high = human_bytes(self.total_low), human_bytes(self.total_high)
        needed = low if low == high else f"{low} to {high}"
        return f"<estimate for {several}{self.gpu}: {self.verdict}, {needed}>"

    @property
    def fits(self) -> bool:
        """Whether it fits even at the upper end of every range."""
        return self.verdict == FITS

    @property
    def steps_until_full(self) -> int:
        """About how many more steps fill the GPU, if memory grows: 0 if it does not."""
        if not self.growth:
            return 0
        allocated = max(self.peak_allocated, self.allocated_high)
        outside = self.context_high + self.nccl_high + self.processes_high
        return steps_until_full(self.capacity - allocated - outside, self.growth)

    @property
    def context_bytes(self) -> int:
        """The upper end of the context's range, for planning."""
        return self.context_high

    @property
    def total_low(self) -> Size:
        return self.reserved_low + self.context_low + self.nccl_low + self.processes_low

    @property
    def total_high(self) -> Size:
        return self.reserved_high + self.context_high + self.nccl_high + self.processes_high


def priced(estimate: Estimate, price: float, date: str) -> Estimate:
    """The estimate with the cost of a step, at the ``price`` of an hour of one GPU, of a price list
    of that ``date`` if it is not "".
    """
    if isinstance(estimate.step_time, Unavailable):
        return estimate
    gpus = max(estimate.ranks, estimate.devices)
    return replace(estimate, cost=cost_of(estimate.step_time, price, gpus, date))
