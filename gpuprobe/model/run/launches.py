"""What a step launched on GPUs: kernels, calls of libraries, collectives and CUDA graphs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Final

from gpuprobe.errors import DataError
from gpuprobe.model.place import SourceLine
from gpuprobe.model.record import record
from gpuprobe.model.values import AtMost, Count, Index, Size, Unavailable

MOST_ROWS: Final = 100_000
"""Kinds of launches that a recording has of one step: a step of a large model has some thousand."""

NOT_COUNTED: Final = Unavailable("not counted")


class LaunchKind(Enum):
    """What was launched."""

    KERNEL = "kernel"
    """A kernel whose name and configuration are known: torch's, Triton's, an extension's."""
    LIBRARY = "library"
    """A call of cuBLAS, cuDNN or another library, which picks its kernels itself: one launch under
    the function's name."""
    COLLECTIVE = "collective"
    """A call of NCCL: one launch under the function's name."""
    GRAPH = "graph"
    """A CUDA graph that is replayed: one launch, whatever it contains."""


@dataclass(frozen=True, slots=True)
class LaunchedKernel:
    """A kernel with its launch configuration.

    ``grid`` (blocks) and ``block`` (threads) have three numbers, and none where the configuration
    is unknown; ``shared`` is dynamic shared memory per block. ``multiprocessors``: of the device, 0
    where unknown. ``nodes``: of a graph, the kernels that one launch replays. ``captured``: it was
    captured in a CUDA graph instead of being launched.
    """

    name: str
    kind: LaunchKind = LaunchKind.KERNEL
    device: str = "cuda:0"
    grid: Annotated[tuple[Count, ...], AtMost(3)] = ()
    block: Annotated[tuple[Count, ...], AtMost(3)] = ()
    shared: Size = 0
    multiprocessors: Count = 0
    nodes: Count = 0
    captured: bool = False

    @property
    def blocks(self) -> int:
        """The blocks of the grid; 0 where they are unknown."""
        if not self.grid:
            return 0
        product = 1
        for number in self.grid:
            product *= number
        return product

    @property
    def tiny(self) -> bool:
        """Whether it has fewer blocks than its device has multiprocessors, so that some of them are
        idle. The CUDA C++ Best Practices Guide, "Thread and Block Heuristics", recommends at least
        as many blocks as multiprocessors.
        """
        return 0 < self.blocks < self.multiprocessors


@dataclass(frozen=True, slots=True)
class LaunchPlace:
    """Where launches are from. ``place`` is the text of a place. In the backward pass line and
    module are those of the operator whose gradient is computed. ``decoding``: in ``generate``, from
    the second call of the model on, with what the program does between the calls.
    """

    phase: str
    place: str
    module: str = ""
    decoding: bool = False


@record(frozen=True, slots=True)
class StepLaunches:
    """The launches of one step. ``count[i]`` launches of ``kernels[kernel[i]]`` are from
    ``places[place[i]]``. ``decoded``: the calls of the model in ``generate`` that each decoded one
    token of every sequence.
    """

    kernels: Annotated[tuple[LaunchedKernel, ...], AtMost(MOST_ROWS)] = ()
    places: Annotated[tuple[LaunchPlace, ...], AtMost(MOST_ROWS)] = ()
    kernel: Annotated[tuple[Index, ...], AtMost(MOST_ROWS)] = ()
    place: Annotated[tuple[Index, ...], AtMost(MOST_ROWS)] = ()
    count: Annotated[tuple[Count, ...], AtMost(MOST_ROWS)] = ()
    decoded: Count = 0


Launched = tuple[LaunchedKernel, LaunchPlace, int]
"""A kernel, where it was launched, and how often."""


def step_launches(rows: Iterable[Launched], decoded: int = 0) -> StepLaunches:
    """Rows as a recording has them. Equal ones are added up; the most frequent kernels come first.
    Of more than `MOST_ROWS` different ones, the rest is left out.
    """
    kernels: dict[LaunchedKernel, int] = {}
    places: dict[LaunchPlace, int] = {}
    sums: dict[tuple[int, int], int] = {}  # by numbers: hashing a kernel takes a microsecond
    for kernel, place, count in rows:
        key = kernels.setdefault(kernel, len(kernels)), places.setdefault(place, len(places))
        sums[key] = sums.get(key, 0) + count
    ordered = sorted(sums.items(), key=lambda item: -item[1])[:MOST_ROWS]
    of_kernels, of_places = list(kernels), list(places)
    kernel_at: dict[int, int] = {}
    place_at: dict[int, int] = {}
    columns = [
        (kernel_at.setdefault(one, len(kernel_at)), place_at.setdefault(two, len(place_at)), count)
        for (one, two), count in ordered
    ]
    return StepLaunches(
        tuple(of_kernels[one] for one in kernel_at),
        tuple(of_places[one] for one in place_at),
        tuple(kernel for kernel, _, _ in columns),
        tuple(place for _, place, _ in columns),
        tuple(count for _, _, count in columns),
        decoded,
    )


def rows_of(launches: StepLaunches) -> list[Launched]:
    """The rows of a step, the most frequent first."""
    return [
        (launches.kernels[kernel], launches.places[place], count)
        for kernel, place, count in zip(
            launches.kernel, launches.place, launches.count, strict=True
        )
    ]


def joined(
    earlier: StepLaunches | Unavailable, later: StepLaunches | Unavailable
) -> StepLaunches | Unavailable:
    """The launches of two parts of one step; those of the part that has them, if only one has."""
    if isinstance(earlier, Unavailable):
        return later
    if isinstance(later, Unavailable):
        return earlier
    rows = [*rows_of(earlier), *rows_of(later)]
    return step_launches(rows, earlier.decoded + later.decoded)


def check_launches(launches: StepLaunches | Unavailable) -> None:
    """Raises DataError for launches whose columns do not belong together."""
    if isinstance(launches, Unavailable):
        return
    if not len(launches.kernel) == len(launches.place) == len(launches.count):
        raise DataError("the columns of launches have different lengths")
    if max(launches.kernel, default=-1) >= len(launches.kernels):
        raise DataError("launches of a kernel that is not listed")
    if max(launches.place, default=-1) >= len(launches.places):
        raise DataError("launches at a place that is not listed")


# -- in a report


@record(frozen=True)
class LaunchRow:
    """The launches of one kernel, with one configuration, at one place and in one phase."""

    kernel: str
    kind: LaunchKind
    device: str
    grid: tuple[int, ...]
    block: tuple[int, ...]
    shared: int
    tiny: bool
    nodes: int
    captured: bool
    phase: str
    place: SourceLine
    module: str
    decoding: bool
    count: int


@record(frozen=True)
class LaunchesOfStep:
    """How many launches a step made."""

    step: int
    count: int


@record(frozen=True)
class LaunchReport:
    """What one rank launched in one step. ``count`` = ``kernels`` + ``library`` + ``collectives`` +
    ``graphs``, and is the sum of the rows that were not captured. ``tiny`` of the kernels have
    fewer blocks than ``multiprocessors`` (of the first device; 0 where unknown); ``replayed``
    kernels ran within the graphs, and ``captured`` were captured in one instead of being launched.
    ``mergeable`` of the kernels are elementwise or reductions. The rows with ``decoding`` are those
    of ``decoded`` tokens of every sequence, after the prefill of ``generate``.

    ``steps`` are all steps whose launches were counted.
    """

    rank: int
    step: int
    count: int
    kernels: int
    library: int
    collectives: int
    graphs: int
    replayed: int
    captured: int
    tiny: int
    mergeable: int
    decoded: int
    multiprocessors: int
    steps: tuple[LaunchesOfStep, ...]
    rows: tuple[LaunchRow, ...]
