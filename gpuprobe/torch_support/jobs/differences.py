"""In what the ranks of a pretended job differ, as one of them can tell: it sends to another along
a group (a stage of a pipeline), or holds shards that are not equally large.
"""

from __future__ import annotations

import sys
from typing import Any

from gpuprobe.patching import Patches


def ranks_of(group: Any) -> tuple[int, ...]:
    """The ranks of a process group, as numbers of the whole job."""
    from torch.distributed import get_process_group_ranks

    return tuple(get_process_group_ranks(group))


class Differences:
    """What one rank finds. ``groups`` are the ranks of every process group of the job, those of
    other ranks too: every rank makes all groups. ``stages`` are groups whose ranks send to each
    other. ``shards`` are groups with a label for each rank: equal labels, equal shards.
    """

    def __init__(self) -> None:
        self.groups: dict[tuple[int, ...], None] = {}
        self.stages: dict[tuple[int, ...], None] = {}
        self.shards: dict[tuple[tuple[int, ...], tuple[int, ...]], None] = {}

    def install(self, patches: Patches) -> None:
        """Look at what every optimizer holds, after each of its steps."""
        from torch.optim.optimizer import register_optimizer_step_post_hook

        patches.add(register_optimizer_step_post_hook(self._stepped).remove)

    def sent(self, group: Any) -> None:
        """This rank sends to, or receives from, one rank of a group."""
        self.stages[ranks_of(group)] = None

    def document(self) -> dict[str, Any]:
        return {
            "groups": [list(ranks) for ranks in self.groups],
            "stages": [list(ranks) for ranks in self.stages],
            "shards": [[list(ranks), list(labels)] for ranks, labels in self.shards],
        }

    def _stepped(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        partition = getattr(optimizer, "_partition_parameters", None)
        if partition is not None:  # ZeroRedundancyOptimizer: whole tensors, dealt out to ranks
            held = [
                tuple(sorted(p.numel() for part in parts for p in part["params"]))
                for parts in partition()
            ]
            self._label(ranks_of(optimizer.process_group), held)
            return
        if "torch.distributed.tensor" not in sys.modules:
            return
        from torch.distributed.tensor import DTensor

        sizes: dict[tuple[int, ...], list[list[int]]] = {}
        for part in optimizer.param_groups:
            for tensor in part["params"]:
                if isinstance(tensor, DTensor):
                    _uneven(tensor, sizes)
        for ranks, columns in sizes.items():
            self._label(ranks, list(zip(*columns, strict=True)))

    def _label(self, ranks: tuple[int, ...], held: list[tuple[int, ...]]) -> None:
        numbers = {what: number for number, what in enumerate(dict.fromkeys(held))}
        if len(numbers) > 1:
            self.shards[ranks, tuple(numbers[what] for what in held)] = None


def _uneven(tensor: Any, sizes: dict[tuple[int, ...], list[list[int]]]) -> None:
    """Add a column to ``sizes`` for each dimension of the mesh that cuts ``tensor`` into shards
    that are not equally large: how much each rank of that dimension's group has.
    """
    mesh = tensor.device_mesh
    cuts: dict[int, list[int]] = {}  # the dimensions of the mesh, by that of the tensor
    for number, placement in enumerate(tensor.placements):
        dim = getattr(placement, "dim", None)  # of Shard, and of FSDP's shards of shards
        if dim is not None:
            cuts.setdefault(dim, []).append(number)
    for dim, numbers in cuts.items():
        size = tensor.shape[dim]
        pieces = 1
        for number in numbers:
            pieces *= mesh.size(number)
        if size % pieces == 0:
            continue
        for number in numbers:
            count = mesh.size(number)
            whole = -(-size // count)  # as torch.chunk does, and so DTensor
            column = [max(0, min(whole, size - index * whole)) for index in range(count)]
            if len(numbers) > 1:  # cut twice: all may differ
                column = list(range(count))
            sizes.setdefault(ranks_of(mesh.get_group(number)), []).append(column)
