"""What an estimate is made of: the request, from the command line, Python, an agent or a notebook,
unchanged down to the process that runs the program.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from gpuprobe.errors import UsageError

DEFAULT_GPU: Final = "h100-80gb"
DISTINCT: Final = "distinct"
"""As `EstimateRequest.rank`: one rank of each class of ranks that behave alike."""
_SEVERAL: Final = re.compile(r"^\d+\s*[x*×]\s*")


@dataclass(frozen=True, slots=True)
class ParameterSource:
    """Where a program takes a parameter from: a command-line ``option``, or a ``constant`` that it
    assigns at its top level. ``value`` is the program's own, 0 if unknown.
    """

    option: str = ""
    constant: str = ""
    value: int = 0

    @property
    def description(self) -> str:
        if self.option:
            return f"as the option {self.option}"
        return f"in place of the constant {self.constant}"


@dataclass(frozen=True, slots=True)
class PriceList:
    """Prices of an hour by the GPU's name; under "" that of all others. ``date``: of the file that
    they are from, which may have other GPUs as well.
    """

    by_gpu: Mapping[str, float] = field(default_factory=dict)
    date: str = ""

    def of(self, gpu: str) -> float:
        """The price of the GPU, of which there may be several (``2xt4``); 0 without one."""
        prices = self.by_gpu
        return prices.get(gpu, prices.get(_SEVERAL.sub("", gpu), prices.get("", 0.0)))

    def check(self, gpus: Sequence[str]) -> None:
        """Raises UsageError for a price of a GPU that is not among those that are estimated, and
        for a file with none of them.
        """
        if self.date:
            if not any(map(self.of, gpus)):
                raise UsageError(
                    f"the price list of {self.date} has no price of {', '.join(gpus)}",
                    hint="add it to the file, or --price PRICE",
                )
            return
        unknown = sorted(set(self.by_gpu) - {"", *gpus})
        if unknown:
            raise UsageError(
                f"a price of {unknown[0]}, which is not estimated",
                hint=f"one of: {', '.join(gpus)}",
            )


@dataclass(frozen=True, slots=True)
class EstimateRequest:
    """A run on simulated GPUs whose memory is estimated. Variations of it are made with
    `dataclasses.replace`.

    The program is a ``script``, or (``module``) a module of that name, with its ``arguments``; ""
    for a function. It is stopped after ``steps`` optimizer steps, or ``max_seconds`` if not 0.
    ``gpu`` names entries of the catalogue (``"2xa100-40gb"``), ``compute`` what is computed
    (``"auto"``, ``"shapes"``, ``"real"``), ``conf`` the allocator's settings in place of
    ``PYTORCH_CUDA_ALLOC_CONF``, ``assume`` values for lines that read unknown ones
    (``FILE:LINE=VALUE``).

    ``rank`` of ``ranks`` processes, from 0; several of them, or `DISTINCT`. ``network``:
    GB/s of each GPU's network adapter, 0 if unknown; ``per_node``: ranks on each node, 0 for the
    number of GPUs.
    ``output``: where the recording of the estimated ranks is kept, ``recorded`` the ranks to keep,
    if not all. ``suggest``: if it does not fit, also estimate changes to the run.

    ``gpus`` names GPUs that are compared in a table, separated by commas, or ``all`` of the
    catalogue. ``prices``: of an hour of one GPU.

    A variation has ``value`` in place of the program's ``parameter``, or a ``change`` that is made
    without editing the source (`gpuprobe.planning.changes`). In processes that an estimate starts,
    ``why`` is the reason of a second run, which keeps the bounds of ``auto``, and ``meeting`` the
    rendezvous of the ranks (`gpuprobe.planning.peers`).
    """

    script: str = ""
    arguments: tuple[str, ...] = ()
    module: bool = False
    gpu: str = DEFAULT_GPU
    steps: int = 3
    max_seconds: float = 0.0
    compute: str = "auto"
    conf: str | None = None
    assume: tuple[str, ...] = ()
    ranks: int = 1
    rank: int | tuple[int, ...] | str = 0
    network: float = 0.0
    per_node: int = 0
    output: str = ""
    recorded: tuple[int, ...] = ()
    suggest: bool = False
    gpus: str = ""
    prices: PriceList = PriceList()
    parameter: ParameterSource | None = None
    value: int = 0
    change: str = ""
    why: str = ""
    meeting: str = ""

    @property
    def one_rank(self) -> int:
        """The rank that a process estimates. Raises TypeError for several."""
        if not isinstance(self.rank, int):
            raise TypeError("a process estimates one rank")
        return self.rank

    @property
    def price(self) -> float:
        """Of an hour of one of its GPUs; 0 without one."""
        return self.prices.of(self.gpu)

    def check(self) -> None:
        """Raises UsageError for a run without any step, and for a rank that the job lacks."""
        if self.steps < 1:
            raise UsageError("at least one step is needed")
        if isinstance(self.rank, str):
            if self.rank != DISTINCT:
                raise UsageError(
                    f"unknown ranks {self.rank!r}", hint=f"numbers from 0, or {DISTINCT!r}"
                )
            return
        for rank in self.rank if isinstance(self.rank, tuple) else (self.rank,):
            if not 0 <= rank < self.ranks:
                raise UsageError(
                    f"there is no rank {rank} of {self.ranks}",
                    hint=f"ranks are counted from 0: the last one is {self.ranks - 1}",
                )


def ranks_of(listed: Sequence[int] | str) -> int | tuple[int, ...] | str:
    """`EstimateRequest.rank` for the value of ``--rank``, a list of numbers or `DISTINCT`."""
    if isinstance(listed, str):
        return listed
    return listed[0] if len(listed) == 1 else tuple(listed)
