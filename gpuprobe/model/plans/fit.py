"""The largest value of a setting with which a training run still fits on a GPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from gpuprobe.model.plans.estimate import FITS, MODES
from gpuprobe.model.plans.step_time import NOT_PREDICTED, StepTime, TrainingCost
from gpuprobe.model.values import (
    Bounds,
    Bytes,
    Count,
    Displayed,
    Nanoseconds,
    OneOf,
    Unavailable,
    World,
)

_NO_TIME = Nanoseconds(0)


@dataclass(frozen=True, slots=True)
class Trial:
    """One estimate. ``value`` is what was tried, ``verdict`` one of
    `gpuprobe.model.plans.estimate`'s.

    ``needed`` is the upper end of the run's memory with its context, ``peak_allocated`` the
    tensors' part, ``capacity`` the GPU's whole memory; bytes. ``failed`` is why there is no
    estimate (the figures are then 0), or "". ``time``: of a step. ``no_kernels``: that this build
    of torch has none for the GPU, or "".
    """

    value: int
    verdict: str
    peak_allocated: Bytes
    needed: Bytes
    capacity: Bytes
    failed: str = ""
    time: StepTime | Unavailable = NOT_PREDICTED
    no_kernels: str = ""

    @property
    def fits(self) -> bool:
        return not self.failed and self.verdict == FITS

    def acts_as(self, other: Trial) -> bool:
        """Whether its step gets as much data as the other's, and needs the same memory: the data
        may have no more rows, or the value does something else.
        """
        mine, others = (
            () if isinstance(one.time, Unavailable) else one.time.counted for one in (self, other)
        )
        gets = any(count for _, count in mine) and mine == others
        return gets and self.peak_allocated == other.peak_allocated


@dataclass(frozen=True, slots=True)
class FitSuggestion:
    """What a change would bring, from estimates of the changed run.

    ``before`` and ``after`` are the memory without and with the change, at the largest value that
    fits without the change; ``largest`` is the largest value found to fit with the change, to
    within a hundredth; None if it was not searched for.
    """

    name: str
    how: str
    before: Bytes
    after: Bytes
    largest: int | None

    @property
    def saved(self) -> Annotated[int, "negative: it costs memory"]:
        """Bytes; negative where it costs memory."""
        return self.before - self.after


@dataclass(frozen=True, slots=True)
class FitChoice:
    """One of several choices of GPU and number of ranks. ``largest`` is the largest value that fits
    on each rank, None if none does; ``needed`` what it needs of ``capacity``, bytes. ``failed`` is
    why there is no estimate, or "". At that value, a step takes ``expected_ns``, predicted with its
    range, for so many tokens, images or samples of each rank; all 0 without a time, and why
    (``no_time``). ``measured``: see `StepTime`; ``no_kernels``: see `Trial`.
    """

    gpu: str
    ranks: World
    largest: Annotated[int, Bounds(1)] | None
    needed: Bytes
    capacity: Bytes
    failed: str = ""
    low_ns: Nanoseconds = _NO_TIME
    expected_ns: Nanoseconds = _NO_TIME
    high_ns: Nanoseconds = _NO_TIME
    tokens: Count = 0
    images: Count = 0
    samples: Count = 0
    measured: Annotated[float, Bounds(0, 1)] = 0.0
    no_time: str = ""
    no_kernels: str = ""
    cost: TrainingCost | None = None

    @property
    def total(self) -> Count:
        """The values of all ranks."""
        return (self.largest or 0) * self.ranks


@dataclass(frozen=True, slots=True)
class Fit(Displayed):
    """The result: ``largest`` is the largest value that fits, None if not even ``least`` does. Of
    values that act alike (`Trial.acts_as`) it is the smallest; ``without_effect`` are the others,
    after which none was tried.

    ``proof`` is the estimate at ``largest``, ``beyond`` that at the next larger value tried, which
    does not fit (None if the search ended at its upper bound), ``trials`` are all, by value.

    If several GPUs or numbers of ranks were given, or prices, ``choices`` has a row for each, and
    the other fields are about the one with the largest sum of the values of all ranks.
    """

    gpu: str
    capacity: Bytes
    argument: str
    applied: Annotated[str, "how the value was given to the script"]
    compute: Annotated[str, OneOf(("auto", *MODES)), "auto: each estimate computed what it could"]
    least: Annotated[int, Bounds(1)]
    most: Annotated[int, Bounds(1)]
    largest: Annotated[int | None, "null: not even the smallest fits"]
    proof: Trial | None
    beyond: Trial | None
    trials: tuple[Trial, ...]
    suggestions: tuple[FitSuggestion, ...]
    not_tried: tuple[str, ...]
    unusual: Annotated[tuple[int, ...], "values at which the need falls though the value rises"]
    interrupted: Annotated[bool, "Ctrl-C ended the search, so a larger value may fit"] = False
    ranks: Annotated[World, "processes, of which one is estimated"] = 1
    choices: Annotated[tuple[FitChoice, ...], "of several GPUs or numbers of ranks, each"] = ()
    out_of_time: Annotated[bool, "its limit ended the search, so a larger value may fit"] = False
    without_effect: Annotated[
        tuple[int, ...],
        "larger values, with which a step gets as much data and needs as much memory",
    ] = ()

    @property
    def untried(self) -> tuple[int, int] | None:
        """The values, first and last, of which it is unknown whether they fit, if the search was
        stopped.
        """
        if not (self.interrupted or self.out_of_time):
            return None
        if self.largest is None:
            smallest = min((trial.value for trial in self.trials), default=self.most + 1)
            first, last = self.least, smallest - 1
        else:
            last = self.most if self.beyond is None else self.beyond.value - 1
            first = self.largest + 1
        return (first, last) if first <= last else None

    def __repr__(self) -> str:
        found = f"not even {self.least}" if self.largest is None else str(self.largest)
        return f"<fit on {self.gpu}: largest {self.argument} that fits is {found}>"
