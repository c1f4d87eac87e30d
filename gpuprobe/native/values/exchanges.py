"""Collectives of the program, which carry their own values: what they read and write, by their
arguments' names, and how they are replayed in CUDA graphs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, Protocol

import torch
from torch._ops import OpOverload
from torch.multiprocessing.reductions import StorageWeakRef

from gpuprobe.errors import NotModelled
from gpuprobe.native.values.arguments import Args, Kwargs
from gpuprobe.native.values.draws import Key

SPACES: Final = frozenset({"c10d", "_c10d_functional"})
_RECEIVES: Final = frozenset({"recv_", "recv_any_source_"})
_PLAYED: Final = frozenset(
    """
    _allgather_base_ _reduce_scatter_base_ allreduce_ allreduce_coalesced_ alltoall_base_ barrier
    broadcast_ recv_ reduce_ send
    """.split()  # noqa: SIM905
)
"""Those that call NCCL and nothing else: others copy their results too, before the graph's
operators are computed."""


class _Player(Protocol):
    def play(self, collective: CapturedCollective) -> None:
        """Run a collective of a graph."""


class CapturedCollective:
    """A collective in a CUDA graph, which a replay runs in its place among the operators.

    ``known``: whether all that it reads had values when it was captured. ``written``: the storages
    that it writes, where values may be unknown.
    """

    __slots__ = ("key", "known", "number", "written")

    def __init__(
        self, number: int, known: bool = True, written: tuple[StorageWeakRef, ...] = ()
    ) -> None:
        self.number = number
        self.known = known
        self.written = written
        self.key: Key | None = None

    def run(self, computing: _Player) -> None:
        """Run it: the other ranks replay their graphs, too."""
        computing.play(self)


def _tensors(value: object) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)


def read_and_written(
    func: OpOverload, args: Args, kwargs: Kwargs
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The tensors that a collective sends, and those of its arguments that it writes. Schemas:
    ``torch/csrc/distributed/c10d/Ops.cpp`` and ``Functional.cpp``.
    """
    names = [argument.name for argument in func._schema.arguments]
    name = func._schema.name.partition("::")[2]
    read: list[torch.Tensor] = []
    written: list[torch.Tensor] = []
    for key, value in (*zip(names, args, strict=False), *kwargs.items()):
        found = list(_tensors(value))
        if key.startswith("output") or name in _RECEIVES:
            written += found
        else:
            read += found
            if key == "tensors" or (name.endswith("_") and not key.startswith("input")):
                written += found
    return read, written


def check_captured(func: OpOverload) -> None:
    """Raise NotModelled for a collective that a replay cannot run in its place."""
    if func._schema.name.partition("::")[2] not in _PLAYED:
        raise NotModelled(
            f"{func}: this collective is not computed in a CUDA graph",
            hint="use one that works on one tensor: all_gather_into_tensor, reduce_scatter_tensor",
        )
