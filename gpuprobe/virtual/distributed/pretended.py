"""Collectives of a pretended rank: what it receives where nobody else is there.

The others are taken to hold what this rank holds, since they run the same program: a sum over N
ranks is N times this one's, what is gathered is N copies of it. Where one of them sends what it
alone has, the buffer keeps what it held before, and zeros for floating point, so that results
repeat. Python objects are different: a program acts on them (a stage of a pipeline is sent the
shapes of its inputs), so `Objects` has them from the rank that sends them.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, Final, Protocol

import torch
import torch.distributed as dist

from gpuprobe.torch_support.tensors import storage_key

_Tensors = list[torch.Tensor]


def _ops() -> tuple[Any, Any]:
    op = dist.ReduceOp.RedOpType
    return (op.SUM, op.PREMUL_SUM), op.PRODUCT


def _reduce(tensor: torch.Tensor, kind: Any, ranks: int) -> None:
    """In place, what ``ranks`` ranks with this very tensor come to."""
    sums, product = _ops()
    if any(kind == op for op in sums):
        tensor.mul_(ranks)
    elif kind == product:
        tensor.pow_(ranks)


def _apart(source: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
    """``source``, in memory that ``output`` does not lie in."""
    return source.clone() if storage_key(source) == storage_key(output) else source


def _fill(outputs: Iterator[torch.Tensor], source: torch.Tensor) -> None:
    for output in outputs:
        if output.data_ptr() != source.data_ptr():
            output.copy_(source.view(output.shape) if source.numel() == output.numel() else source)


def _gathered(output: torch.Tensor, source: torch.Tensor) -> None:
    """N copies of ``source``, one after the other, in one tensor, of which it may be a part."""
    if source.numel():
        output.view(-1, source.numel()).copy_(_apart(source, output).reshape(1, -1))


def _all_reduce(group: Any, tensors: _Tensors, _: Any, kind: Any, *rest: Any) -> None:
    for tensor in tensors:
        _reduce(tensor, kind, group.size())


def _reduced(group: Any, tensors: _Tensors, _: Any, kind: Any, root: int, *rest: Any) -> None:
    if root == group.rank():
        _all_reduce(group, tensors, _, kind)


def _all_gather(group: Any, outputs: list[_Tensors], inputs: _Tensors, *rest: Any) -> None:
    for output, source in zip(outputs, inputs, strict=True):
        _fill(iter(output), source)


def _all_gather_base(group: Any, output: torch.Tensor, source: torch.Tensor, *rest: Any) -> None:
    _gathered(output, source)


def _all_gather_tensors(group: Any, outputs: _Tensors, inputs: _Tensors, *rest: Any) -> None:
    for output, source in zip(outputs, inputs, strict=True):
        _gathered(output, source)


def _all_gather_coalesced(
    group: Any, outputs: list[_Tensors], inputs: _Tensors, *rest: Any
) -> None:
    for of_rank in outputs:
        for output, source in zip(of_rank, inputs, strict=True):
            output.copy_(source)


def _scatter_sum(
    group: Any, outputs: _Tensors, inputs: list[_Tensors], _: Any, kind: Any, *rest: Any
) -> None:
    for output, parts in zip(outputs, inputs, strict=True):
        output.copy_(parts[group.rank()].view(output.shape))
        _reduce(output, kind, group.size())


def _scatter_sum_base(
    group: Any, output: torch.Tensor, source: torch.Tensor, _: Any, kind: Any, *rest: Any
) -> None:
    if output.numel():
        source = _apart(source, output)
        output.view(-1).copy_(source.reshape(-1, output.numel())[group.rank()])
        _reduce(output, kind, group.size())


def _scatter_sum_tensors(
    group: Any, outputs: _Tensors, inputs: _Tensors, _: Any, kind: Any, *rest: Any
) -> None:
    for output, source in zip(outputs, inputs, strict=True):
        _scatter_sum_base(group, output, source, _, kind)


def _all_to_all(group: Any, outputs: _Tensors, inputs: _Tensors, *rest: Any) -> None:
    """Each rank sends this one as much as this one sends to it: the load is taken to be even."""
    for output, source in zip(outputs, inputs, strict=True):
        if output.numel() == source.numel():
            output.copy_(source.view(output.shape))
        else:
            output.zero_()


def _all_to_all_base(group: Any, output: torch.Tensor, source: torch.Tensor, *rest: Any) -> None:
    if output.numel() == source.numel():
        output.view(-1).copy_(source.reshape(-1))
    else:
        output.zero_()


def _gather(group: Any, outputs: list[_Tensors], inputs: _Tensors, *rest: Any) -> None:
    for output, source in zip(outputs, inputs, strict=False):  # no outputs but on the root
        _fill(iter(output), source)


def _scatter(group: Any, outputs: _Tensors, inputs: list[_Tensors], *rest: Any) -> None:
    for output, parts in zip(outputs, inputs, strict=False):  # no inputs but on the root
        output.copy_(parts[group.rank()])


def _received(group: Any, tensors: _Tensors, *rest: Any) -> None:
    for tensor in tensors:
        if tensor.is_floating_point() or tensor.is_complex():
            tensor.zero_()


class PeerRanks(Protocol):
    """The other ranks of the pretended job, each of which is a process once somebody asks it."""

    def post(self, name: str, content: bytes) -> None:
        """Have ``content`` ready for whoever takes what has that name."""
        ...

    def take(self, name: str, rank: int) -> bytes:
        """What ``rank`` posts under a name, once it has. Raises ProgramFailed where it never
        does.
        """
        ...


class Objects:
    """What carries the bytes of Python objects from rank to rank, while one of torch's functions
    of objects is at work.
    """

    def __init__(self, peers: PeerRanks) -> None:
        self._peers = peers
        self._calls = threading.local()
        self._counts: Counter[str] = Counter()

    def carrying(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """One of torch's functions that send or receive objects."""

        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            self._calls.depth = getattr(self._calls, "depth", 0) + 1
            try:
                return original(*args, **kwargs)
            finally:
                self._calls.depth -= 1

        return call

    def carry(self, name: str, group: Any, args: tuple[Any, ...]) -> bool:
        """Do what the operator ``name`` of ``c10d`` does, if it is about an object. Its arguments
        but for the group follow.
        """
        if not getattr(self._calls, "depth", 0):
            return False
        if name == "send":
            self._post(group, group.rank(), args[1], args[0][0])
        elif name == "recv_":
            self._take(group, args[1], group.rank(), args[0][0])
        elif name == "broadcast_":
            if args[1] == group.rank():
                self._post(group, args[1], "all", args[0][0])
            else:
                self._take(group, args[1], "all", args[0][0])
        elif name == "scatter_":
            if args[2] == group.rank():
                for rank, part in enumerate(args[1][0]):
                    self._post(group, args[2], rank, part)
                args[0][0].copy_(args[1][0][group.rank()])
            else:
                self._take(group, args[2], group.rank(), args[0][0])
        else:
            return False
        return True

    def _name(self, group: Any, source: int, target: int | str) -> str:
        """Ranks of one group are told apart by their number in the whole job."""
        ranks = dist.get_process_group_ranks(group)
        there = target if isinstance(target, str) else ranks[target]
        name = f"{'.'.join(map(str, ranks))}-{ranks[source]}-{there}"
        digest = hashlib.sha256(name.encode()).hexdigest()[:24]
        self._counts[digest] += 1
        return f"{digest}-{self._counts[digest]}"

    def _post(self, group: Any, source: int, target: int | str, tensor: torch.Tensor) -> None:
        self._peers.post(self._name(group, source, target), _bytes(tensor))

    def _take(self, group: Any, source: int, target: int | str, tensor: torch.Tensor) -> None:
        rank = dist.get_process_group_ranks(group)[source]
        content = self._peers.take(self._name(group, source, target), rank)
        found = torch.frombuffer(bytearray(content), dtype=tensor.dtype)
        tensor.copy_(found.view(tensor.shape))


def _bytes(tensor: torch.Tensor) -> bytes:
    whole = tensor.contiguous()
    return ctypes.string_at(torch._C.TensorBase.data_ptr(whole), whole.nbytes)


def _nothing(group: Any, *rest: Any) -> None:
    pass


ANSWERS: Final[dict[str, Callable[..., None]]] = {
    "_allgather_base_": _all_gather_base,
    "_reduce_scatter_base_": _scatter_sum_base,
    "allgather_": _all_gather,
    "allgather_coalesced_": _all_gather_coalesced,
    "allgather_into_tensor_coalesced_": _all_gather_tensors,
    "allreduce_": _all_reduce,
    "allreduce_coalesced_": _all_reduce,
    "alltoall_": _all_to_all,
    "alltoall_base_": _all_to_all_base,
    "barrier": _nothing,
    "broadcast_": _nothing,
    "gather_": _gather,
    "recv_": _received,
    "recv_any_source_": _received,
    "reduce_": _reduced,
    "reduce_scatter_": _scatter_sum,
    "reduce_scatter_tensor_coalesced_": _scatter_sum_tensors,
    "scatter_": _scatter,
    "send": _nothing,
}
"""What each operator of ``c10d`` leaves in its tensors; it is given the group first, and then its
own arguments, with the ``RedOpType`` of a reduction. Schemas:
``torch/csrc/distributed/c10d/Ops.cpp``."""
