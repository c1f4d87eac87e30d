"""A training run on several GPUs that are not there, in one table."""

from __future__ import annotations

from typing import Annotated

from gpuprobe.model.plans.estimate import FITS
from gpuprobe.model.plans.step_time import TrainingCost
from gpuprobe.model.record import record
from gpuprobe.model.values import Bounds, Bytes, Count, Displayed, Nanoseconds, Size

_NOTHING = Bytes(0)


@record(frozen=True)
class GpuRow:
    """The run on one GPU: memory in bytes, with the context, and the predicted time of a step.

    ``low_ns``, ``expected_ns`` and ``high_ns`` are 0 where it is not predicted, with the reason in
    ``no_time``; ``tokens`` and ``images`` of a step are 0 where it has none. ``cost``: at the price
    that was given. ``failed``: why there is no estimate on this GPU.
    """

    gpu: str
    verdict: str = ""
    total_low: Size = 0
    total_high: Size = 0
    capacity: Bytes = _NOTHING
    low_ns: Nanoseconds = 0
    expected_ns: Nanoseconds = 0
    high_ns: Nanoseconds = 0
    tokens: Count = 0
    images: Count = 0
    samples: Annotated[Count, "of a step, where tokens and images are unknown"] = 0
    measured: Annotated[
        float, Bounds(0, 1), "of the time on the GPU: priced by measured kernels of that GPU"
    ] = 0.0
    no_time: Annotated[str, "why the time is not predicted"] = ""
    cost: Annotated[TrainingCost | None, "at the given price"] = None
    failed: Annotated[str, "why there is no estimate on this GPU"] = ""
    no_kernels: Annotated[str, "that this build of torch has no kernels for the GPU"] = ""

    @property
    def fits(self) -> bool:
        return self.verdict == FITS


@record(frozen=True)
class GpuTable(Displayed):
    """The rows: GPUs that hold the run first, of these the cheapest if prices were given, else the
    fastest.
    """

    rows: tuple[GpuRow, ...]

    def __repr__(self) -> str:
        fitting = [row.gpu for row in self.rows if row.fits]
        return f"<estimates for {len(self.rows)} GPUs: fits {', '.join(fitting) or 'none'}>"
