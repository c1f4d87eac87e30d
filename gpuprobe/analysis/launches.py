"""The kernel launches of a step, by kernel, by line, by module and by phase."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import islice
from typing import Final

from gpuprobe.model.place import parse_place
from gpuprobe.model.run.launches import (
    LaunchedKernel,
    LaunchesOfStep,
    LaunchKind,
    LaunchReport,
    LaunchRow,
    StepLaunches,
    rows_of,
)
from gpuprobe.model.run.recording import RankRecording
from gpuprobe.model.run.session import Step
from gpuprobe.model.values import ReadStatus, Unavailable

NATIVE_ONLY: Final = Unavailable(
    "launches are counted on simulated GPUs only", ReadStatus.NOT_COLLECTED
)

_MERGEABLE: Final = ("elementwise_kernel", "reduce_kernel")
"""In the names of torch's elementwise kernels and reductions (Loops.cuh, CUDALoops.cuh and
Reduce.cuh in aten/src/ATen/native/cuda). Inductor generates its own kernels for these, as few as
possible ("PyTorch 2", ASPLOS 2024, section 4.4)."""

_FIRST_STEPS: Final = 64
"""Steps that are searched for launches: recordings have them for the first three steps, unless
others were chosen."""


def mergeable(kernel: str) -> bool:
    """Whether a kernel of this name is one of torch's elementwise kernels or reductions."""
    return any(name in kernel.partition("<")[0] for name in _MERGEABLE)


def launches_of(rank: RankRecording, index: int | None = None) -> LaunchReport | Unavailable | None:
    """The launches of a rank in the last whole step for which they were counted, or in the step
    with this index. None for a recording without GPU traces; Unavailable if launches were not
    counted.
    """
    counted = counted_steps(rank)
    whole = [step for step, _ in counted if step.ended_by != "end"]
    some = whole or [step for step, _ in counted]
    matching = [step for step in some if index in (None, step.index)]
    if not matching:
        on_gpu = any(device.startswith("cuda") for device in rank.session.devices)
        return NATIVE_ONLY if on_gpu and rank.session.level == "trace" else None
    shown = matching[-1].index
    launches = next(found for step, found in counted if step.index == shown)
    rows = sorted(
        (
            LaunchRow(
                kernel.name,
                kernel.kind,
                kernel.device,
                kernel.grid,
                kernel.block,
                kernel.shared,
                kernel.tiny,
                kernel.nodes,
                kernel.captured,
                place.phase,
                parse_place(place.place),
                place.module,
                place.decoding,
                count,
            )
            for kernel, place, count in rows_of(launches)
        ),
        key=lambda row: (
            -row.count,
            row.kernel,
            row.phase,
            str(row.place),
            row.module,
            row.grid,
            row.decoding,
        ),
    )
    launched = [row for row in rows if not row.captured]

    def total(chosen: Callable[[LaunchRow], bool]) -> int:
        return sum(row.count for row in launched if chosen(row))

    return LaunchReport(
        rank=rank.session.rank,
        step=shown,
        count=total(lambda row: True),
        kernels=total(lambda row: row.kind is LaunchKind.KERNEL),
        library=total(lambda row: row.kind is LaunchKind.LIBRARY),
        collectives=total(lambda row: row.kind is LaunchKind.COLLECTIVE),
        graphs=total(lambda row: row.kind is LaunchKind.GRAPH),
        replayed=sum(row.count * row.nodes for row in launched if row.kind is LaunchKind.GRAPH),
        captured=sum(row.count for row in rows if row.captured),
        tiny=total(lambda row: row.tiny),
        mergeable=total(lambda row: row.kind is LaunchKind.KERNEL and mergeable(row.kernel)),
        decoded=launches.decoded,
        multiprocessors=_multiprocessors(launches.kernels),
        steps=tuple(LaunchesOfStep(step.index, launch_count(found)) for step, found in counted),
        rows=tuple(rows),
    )


def counted_steps(rank: RankRecording) -> list[tuple[Step, StepLaunches]]:
    """The steps for which launches were counted, each with its launches."""
    return [
        (step, step.launches)
        for step in islice(rank.steps, _FIRST_STEPS)
        if not isinstance(step.launches, Unavailable)
    ]


def launch_count(launches: StepLaunches) -> int:
    """The number of launches of a step, without those that were captured in a graph."""
    return sum(count for kernel, _, count in rows_of(launches) if not kernel.captured)


def _multiprocessors(kernels: Iterable[LaunchedKernel]) -> int:
    """The number of multiprocessors of the first device; 0 if unknown."""
    known = [one for one in kernels if one.multiprocessors]
    return min(known, key=lambda one: one.device).multiprocessors if known else 0


BY: Final[dict[str, Callable[[LaunchRow], str]]] = {
    "kernel": lambda row: row.kernel,
    "line": lambda row: str(row.place),
    "module": lambda row: row.module or "(no module)",
    "phase": lambda row: row.phase,
}
"""The breakdowns of launches: the name of the row that a launch belongs to."""


def summed(rows: Iterable[LaunchRow], by: str) -> list[tuple[str, int, int]]:
    """Sum up rows by one of `BY`: (name, launches, tiny launches), the most launches first, without
    captured ones. All breakdowns sum to the same totals.
    """
    name = BY[by]
    sums: dict[str, list[int]] = {}
    for row in rows:
        if not row.captured:
            found = sums.setdefault(name(row), [0, 0])
            found[0] += row.count
            found[1] += row.count if row.tiny else 0
    ordered = sorted(sums.items(), key=lambda item: (-item[1][0], item[0]))
    return [(key, count, tiny) for key, (count, tiny) in ordered]
