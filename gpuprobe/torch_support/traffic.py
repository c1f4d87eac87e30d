"""What a rank of a simulated job sends, and in what ranks differ.

`Traffic` records every operator of ``c10d``, and every functional collective (in the backward pass
too). `Differences` are those that one rank of a pretended job can detect: it sends to another rank
of a group (a stage of a pipeline), or holds shards that are not equally large.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from gpuprobe.model.run.communication import CollectiveRecord, wire_bytes
from gpuprobe.model.values import Bytes
from gpuprobe.patching import Patches
from gpuprobe.torch_support.callers import running_module, user_line
from gpuprobe.torch_support.nccl import Communicator
from gpuprobe.torch_support.tensors import tensors_in

if TYPE_CHECKING:
    from torch._C import FunctionSchema
    from torch._ops import OpOverload
    from torch.distributed import ProcessGroup
    from torch.distributed.tensor import DTensor
    from torch.optim import Optimizer


def ranks_of(group: ProcessGroup) -> tuple[int, ...]:
    """The ranks of a process group, as numbers of the whole job."""
    from torch.distributed import get_process_group_ranks

    return tuple(get_process_group_ranks(group))


class Differences:
    """The differences that one rank detects. ``groups`` are the ranks of every process group of the
    job, those of other ranks too: every rank creates all groups. ``stages`` are groups whose ranks
    send to each other. ``shards`` are groups with a label for each rank: equal labels, equal
    shards.
    """

    def __init__(self) -> None:
        self.groups: dict[tuple[int, ...], None] = {}
        self.stages: dict[tuple[int, ...], None] = {}
        self.shards: dict[tuple[tuple[int, ...], tuple[int, ...]], None] = {}

    def install(self, patches: Patches) -> None:
        """Compare what every optimizer holds, after each of its steps."""
        from torch.optim.optimizer import register_optimizer_step_post_hook

        patches.add(register_optimizer_step_post_hook(self._stepped).remove)

    def sent(self, group: ProcessGroup) -> None:
        """Note that this rank sends to, or receives from, one rank of a group."""
        self.stages[ranks_of(group)] = None

    def document(self) -> dict[str, Any]:
        return {
            "groups": [list(ranks) for ranks in self.groups],
            "stages": [list(ranks) for ranks in self.stages],
            "shards": [[list(ranks), list(labels)] for ranks, labels in self.shards],
        }

    def _stepped(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        partition = getattr(optimizer, "_partition_parameters", None)
        if partition is not None:  # ZeroRedundancyOptimizer: whole tensors, distributed over ranks
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


def _uneven(tensor: DTensor, sizes: dict[tuple[int, ...], list[list[int]]]) -> None:
    """Add a column to ``sizes`` for each dimension of the mesh that divides ``tensor`` into shards
    of different sizes: the size that each rank of that dimension's group has.
    """
    mesh = tensor.device_mesh
    shardings: dict[int, list[int]] = {}  # the dimensions of the mesh, by that of the tensor
    for number, placement in enumerate(tensor.placements):
        dim = getattr(placement, "dim", None)  # of Shard, and of FSDP's strided shards
        if dim is not None:
            shardings.setdefault(dim, []).append(number)
    for dim, numbers in shardings.items():
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
            if len(numbers) > 1:  # sharded twice: all may differ
                column = list(range(count))
            sizes.setdefault(ranks_of(mesh.get_group(number)), []).append(column)


# For each operator: its name here, and the argument that is its payload; "=" is the result.
_C10D: Final = {
    "_allgather_base_": ("all_gather", "output_tensor"),
    "_reduce_scatter_base_": ("reduce_scatter", "input_tensor"),
    "allgather_": ("all_gather", "output_tensors"),
    "allgather_coalesced_": ("all_gather", "output_lists"),
    "allgather_into_tensor_coalesced_": ("all_gather", "outputs"),
    "allreduce_": ("all_reduce", "tensors"),
    "allreduce_coalesced_": ("all_reduce", "tensors"),
    "alltoall_": ("all_to_all", "input_tensors"),
    "alltoall_base_": ("all_to_all", "input"),
    "barrier": ("barrier", ""),
    "broadcast_": ("broadcast", "tensors"),
    "gather_": ("gather", "output_tensors"),
    "recv_": ("recv", "tensors"),
    "recv_any_source_": ("recv", "tensors"),
    "reduce_": ("reduce", "tensors"),
    "reduce_scatter_": ("reduce_scatter", "input_tensors"),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter", "inputs"),
    "scatter_": ("scatter", "input_tensors"),
    "send": ("send", "tensors"),
}
_FUNCTIONAL: Final = {
    "all_gather_into_tensor": ("all_gather", "="),
    "all_gather_into_tensor_coalesced": ("all_gather", "="),
    "all_gather_into_tensor_out": ("all_gather", "="),
    "all_reduce": ("all_reduce", "input"),
    "all_reduce_": ("all_reduce", "input"),
    "all_reduce_coalesced": ("all_reduce", "inputs"),
    "all_reduce_coalesced_": ("all_reduce", "inputs"),
    "all_to_all_single": ("all_to_all", "input"),
    "broadcast": ("broadcast", "input"),
    "broadcast_": ("broadcast", "input"),
    "reduce_scatter_tensor": ("reduce_scatter", "input"),
    "reduce_scatter_tensor_coalesced": ("reduce_scatter", "inputs"),
    "reduce_scatter_tensor_out": ("reduce_scatter", "input"),
}
OPERATORS: Final = {"c10d": tuple(_C10D), "_c10d_functional": tuple(_FUNCTIONAL)}
"""The collectives among torch's operators, by their namespace."""
_TO_ONE: Final = ("send", "recv")
_MESH: Final = "mesh_"
"""How ``DeviceMesh`` begins the description of a group: the name of the dimension follows."""


class Traffic:
    """The records of one rank. ``clock``: nanoseconds from the start of the session."""

    def __init__(self, clock: Callable[[], int]) -> None:
        self._clock = clock
        self._sequence: Counter[str] = Counter()
        self.records: list[CollectiveRecord] = []
        self.differences = Differences()
        self.through_host: set[str] = set()  # names of gloo groups
        self.communicators: dict[str, Communicator] = {}

    def note(
        self,
        func: OpOverload,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        result: object,
        on_host: bool = False,
    ) -> None:
        """Record an operator that has returned, if it is a collective. ``on_host``: it was
        called with tensors that are not on the GPU.
        """
        space, _, name = func._schema.name.partition("::")
        known = (_C10D if space == "c10d" else _FUNCTIONAL).get(name)
        if known is None:
            return
        op, where = known
        given = given_to(func._schema, args, kwargs)
        tensors = list(tensors_in(result if where == "=" else given.get(where, ())))
        payload = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        group = group_of(given)
        ranks = group.size()
        label = str(group.group_name)
        self._sequence[label] += 1
        if op in _TO_ONE:
            self.differences.sent(group)
        if label not in self.through_host and not on_host:
            communicator = self.communicators.setdefault(label, Communicator(ranks))
            communicator.used(op, given.get("dst", given.get("src")))
        description = group.group_desc
        self.records.append(
            CollectiveRecord(
                group=label,
                axis=description.removeprefix(_MESH) if description.startswith(_MESH) else "",
                ranks=ranks,
                sequence=self._sequence[label],
                op=op,
                dtype=str(tensors[0].dtype).removeprefix("torch.") if tensors else "",
                payload=Bytes(payload),
                wire=wire_bytes(op, payload, ranks),
                place=user_line(),
                module=running_module(),
                arrival_ns=self._clock(),
            )
        )


def given_to(
    schema: FunctionSchema, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any]:
    """The arguments of an operator by their names, without those that have their defaults."""
    named = {item.name: value for item, value in zip(schema.arguments, args, strict=False)}
    return {**named, **kwargs}


def group_of(given: dict[str, Any]) -> ProcessGroup:
    """The process group among the arguments of a collective."""
    if "process_group" in given:
        from torch._C._distributed_c10d import ProcessGroup

        return ProcessGroup.unbox(given["process_group"])
    from torch.distributed.distributed_c10d import _resolve_process_group

    named = given["group_name"]
    return _resolve_process_group(named) if isinstance(named, str) else named
