"""How long a training step takes on a GPU: predicted, as a range with its sources."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Final

from gpuprobe.model.record import record
from gpuprobe.model.run.work import NO_SAMPLES
from gpuprobe.model.values import AtMost, Bounds, Count, Nanoseconds, Unavailable

COMPUTE: Final = "computing"
MEMORY: Final = "memory bandwidth"
HOST: Final = "launches by the host"
LINKS: Final = "communication"
COPIES: Final = "copies"
RANKS: Final = "waiting for other ranks"

BOUNDS: Final = (COMPUTE, MEMORY, HOST, LINKS, COPIES, RANKS)

NOT_PREDICTED: Final = Unavailable("not predicted")


@dataclass(frozen=True, slots=True)
class TimeShare:
    """The part of a step that is spent on a phase, line, module or kind of operator, with its
    calls.
    """

    name: str
    ns: Nanoseconds
    calls: Count = 0


@dataclass(frozen=True, slots=True)
class BoundShare:
    """How much of a step is bound by one of `BOUNDS`: the GPU computes, or moves bytes of its
    memory; or it waits for launches, for communication, for copies, or until other ranks call
    the same, with nothing to compute.
    What it does before it waits for a launch is bound by launches, too: the step would take as
    long if that was faster.
    """

    name: str
    ns: Nanoseconds


@dataclass(frozen=True, slots=True)
class RankStepTime:
    """One rank's step: how long it takes, and how much of it is communication, or waiting for other
    ranks, with nothing to compute.
    """

    rank: Count
    ns: Nanoseconds
    communication_ns: Nanoseconds
    waits_ns: Nanoseconds


@record(frozen=True)
class StepTime:
    """The predicted time of one training step on a GPU, with its range.

    ``low_ns`` to ``high_ns`` is where the time of a run on that GPU is expected in 8 of 10 cases.
    ``measured``: the share of the time on the GPU with prices from measured kernels of that very
    GPU; the rest is by models. ``bounds`` and the other tables add up to ``expected_ns``: a moment
    counts to what the GPU computes then, or to what it waits for. ``gpu_ns``: all work on the GPU,
    overlapping or not. ``flops``: of matrix products, attention and convolutions; ``used``:
    of the GPU's peak for their types. ``tokens`` and ``images`` of a step, 0 where it has none;
    ``samples``: rows of the model's first input. ``left_out``: what the figure does not contain.
    ``sources``: of the prices. ``by_rank``: of a job whose ranks were played together, all of them;
    the tables describe the slowest, of equally slow ones that which waits the least. ``by_thread``:
    of the host, by who issued it; empty where that was not recorded.
    """

    gpu: str
    step: Count
    low_ns: Nanoseconds
    expected_ns: Nanoseconds
    high_ns: Nanoseconds
    gpu_ns: Nanoseconds
    measured: Annotated[float, Bounds(0, 1), "of the time on the GPU"]
    bounds: Annotated[tuple[BoundShare, ...], "what bounds the step, the most first"]
    by_kind: tuple[TimeShare, ...]
    by_phase: tuple[TimeShare, ...]
    by_module: tuple[TimeShare, ...]
    by_line: tuple[TimeShare, ...]
    flops: Count = 0
    used: Annotated[
        float | Unavailable, Bounds(0, 1e6), "of the peak of floating-point operations"
    ] = NOT_PREDICTED
    tokens: Count = 0
    images: Count = 0
    samples: Annotated[
        Count | Unavailable, "of a step: rows of the first inputs of the model's calls"
    ] = NO_SAMPLES
    left_out: Annotated[tuple[str, ...], "what the time does not contain"] = ()
    sources: Annotated[tuple[str, ...], AtMost(64), "where the prices are from"] = ()
    by_rank: tuple[RankStepTime, ...] = ()
    by_thread: tuple[TimeShare, ...] = ()
    host_waits: Annotated[Count, "calls by which the host waits for the GPU"] = 0
    host_waits_ns: Annotated[Nanoseconds, "how long it waits in them"] = Nanoseconds(0)

    @property
    def counted(self) -> tuple[tuple[str, int], ...]:
        """What the speed is counted in, with how many a step has: tokens and images, or else
        samples; empty if none are known.
        """
        named = (("tokens", self.tokens), ("images", self.images))
        some = tuple((name, count) for name, count in named if count)
        if some or isinstance(self.samples, Unavailable):
            return some
        return (("samples", self.samples),)

    def per_second(self, count: int) -> tuple[float, float]:
        """``count`` of a step as a rate: the low and the high end."""
        return count / (self.high_ns * 1e-9), count / (self.low_ns * 1e-9)

    def bound_by(self, name: str) -> Nanoseconds:
        """How much of the step is bound by one of `BOUNDS`."""
        return Nanoseconds(sum(row.ns for row in self.bounds if row.name == name))


@record(frozen=True)
class TrainingCost:
    """What training costs at a price for an hour of one GPU, on ``gpus`` of them: the low and the
    high end for a step, and for a billion (10^9) tokens, a million images and a million samples, 0
    where the steps have none. In the currency of the price. ``date``: of the price list it is from.
    """

    price: Annotated[float, Bounds(0, 1e18)]
    gpus: Count
    step_low: Annotated[float, Bounds(0, 1e18)]
    step_high: Annotated[float, Bounds(0, 1e18)]
    tokens_low: Annotated[float, Bounds(0, 1e18), "for 10^9 tokens"] = 0.0
    tokens_high: Annotated[float, Bounds(0, 1e18)] = 0.0
    images_low: Annotated[float, Bounds(0, 1e18), "for 10^6 images"] = 0.0
    images_high: Annotated[float, Bounds(0, 1e18)] = 0.0
    samples_low: Annotated[float, Bounds(0, 1e18), "for 10^6 samples"] = 0.0
    samples_high: Annotated[float, Bounds(0, 1e18)] = 0.0
    date: str = ""


def cost_of(time: StepTime, price: float, gpus: int, date: str = "") -> TrainingCost:
    """The cost of steps that each of ``gpus`` makes with its own tokens, images or samples."""
    low, high = (ns * price * gpus / 3600e9 for ns in (time.low_ns, time.high_ns))
    of_each = {
        f"{name}_{end}": cost * (1e9 if name == "tokens" else 1e6) / (count * gpus)
        for name, count in time.counted
        for end, cost in (("low", low), ("high", high))
    }
    return TrainingCost(price, gpus, low, high, date=date, **of_each)


def speed_fields(time: StepTime) -> dict[str, Any]:
    """What a table of choices has of a step's time, by the names of its fields."""
    names = ("low_ns", "expected_ns", "high_ns", "tokens", "images", "measured")
    return {
        "samples": dict(time.counted).get("samples", 0),
        **{name: getattr(time, name) for name in names},
    }
