"""Copies and sums between the devices of one process that NCCL makes, as for DataParallel.

They do not pass the dispatcher: the functions run, and the values are computed after them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor

from gpuprobe.errors import NotModelled
from gpuprobe.native.values.computing import Computing
from gpuprobe.native.values.skipping import SKIP_DEVICE
from gpuprobe.patching import Patches

_T = TypeVar("_T")
_List: TypeAlias = Sequence[Tensor]
_Lists: TypeAlias = Sequence[Sequence[Tensor]]
_SUM, _PRODUCT, _MAX, _MIN, _MEAN = range(5)  # ncclRedOp_t


class Moves:
    """Makes the functions that take the place of torch's: each calls it, and computes after it."""

    def __init__(self, computing: Computing) -> None:
        self._computing = computing
        self._below = computing.below

    def _quiet(self, run: Callable[..., _T], *args: object, **kwargs: object) -> _T:
        before = self._computing.skipping.set(SKIP_DEVICE)
        try:
            return run(*args, **kwargs)
        finally:
            self._computing.skipping.set(before)

    def _put(self, target: Tensor, value: Tensor) -> None:
        self._computing.aliases.of(target).copy_(value.reshape(target.shape))
        self._computing.written(target)

    def _value(self, tensor: Tensor) -> Tensor:
        return self._computing.aliases.of(tensor) if tensor.is_cuda else tensor

    def _reduced(self, inputs: _List, op: int) -> Tensor:
        values = torch.stack([self._value(item) for item in inputs])
        if op == _SUM:
            return values.sum(0)
        if op == _PRODUCT:
            return values.prod(0)
        if op == _MEAN:
            return values.mean(0)
        if op in (_MAX, _MIN):
            return values.amax(0) if op == _MAX else values.amin(0)
        raise NotModelled(f"NCCL's reduction {op} is not computed")

    def coalesced(self, before: Callable[..., _Lists]) -> Callable[..., _Lists]:
        """``_broadcast_coalesced``: a list of tensors for each device."""

        def run(tensors: _List, devices: Sequence[int], *rest: object) -> _Lists:
            result = self._quiet(before, tensors, devices, *rest)
            with self._below():
                for made in result:
                    for target, source in zip(made, tensors, strict=True):
                        if target is not source:
                            self._put(target, self._value(source))
            return result

        return run

    def broadcast(self, before: Callable[..., _List]) -> Callable[..., _List]:
        """``_broadcast`` and ``_broadcast_out``: one tensor for each device."""

        def run(tensor: Tensor, *rest: object) -> _List:
            result = self._quiet(before, tensor, *rest)
            with self._below():
                for target in result:
                    self._put(target, self._value(tensor))
            return result

        return run

    def all_reduce(self, before: Callable[..., None]) -> Callable[..., None]:
        def run(inputs: _List, outputs: _List | None = None, op: int = _SUM, *rest: object) -> None:
            with self._below():
                value = self._reduced(inputs, op)
            self._quiet(before, inputs, outputs, op, *rest)
            with self._below():
                for target in inputs if outputs is None else outputs:
                    self._put(target, value)

        return run

    def reduce(self, before: Callable[..., None]) -> Callable[..., None]:
        def run(
            inputs: _List, output: Tensor | _List | None = None, root: int = 0, op: int = _SUM,
            *rest: object, outputs: _List | None = None, **named: object,
        ) -> None:  # fmt: skip
            with self._below():
                value = self._reduced(inputs, op)
            if outputs is not None:
                named["outputs"] = outputs
            self._quiet(before, inputs, output, root, op, *rest, **named)
            target = output if output is not None else (outputs or inputs)[root]
            with self._below():
                self._put(target[root] if isinstance(target, (list, tuple)) else target, value)

        return run

    def nccl_broadcast(self, before: Callable[..., None]) -> Callable[..., None]:
        def run(inputs: _List, root: int = 0, *rest: object) -> None:
            self._quiet(before, inputs, root, *rest)
            with self._below():
                for target in inputs:
                    if target is not inputs[root]:
                        self._put(target, self._value(inputs[root]))

        return run

    def all_gather(self, before: Callable[..., None]) -> Callable[..., None]:
        def run(inputs: _List, outputs: _List, *rest: object) -> None:
            with self._below():
                value = self._gathered(inputs)
            self._quiet(before, inputs, outputs, *rest)
            with self._below():
                for target in outputs:
                    self._put(target, value)

        return run

    def _gathered(self, inputs: _List) -> Tensor:
        return torch.cat([self._value(item).flatten() for item in inputs])

    def reduce_scatter(self, before: Callable[..., None]) -> Callable[..., None]:
        def run(inputs: _List, outputs: _List, op: int = _SUM, *rest: object) -> None:
            with self._below():
                value = self._reduced(inputs, op).flatten()
            self._quiet(before, inputs, outputs, op, *rest)
            with self._below():
                for target, part in zip(outputs, value.chunk(len(outputs)), strict=True):
                    self._put(target, part)

        return run


class Forgotten(Moves):
    """The same without values: what is written is unknown."""

    def __init__(self, computing: Computing, unknown: Callable[[Tensor], None]) -> None:
        super().__init__(computing)
        self._unknown = unknown

    def _put(self, target: Tensor, value: Tensor) -> None:
        self._unknown(target)

    def _value(self, tensor: Tensor) -> Tensor:
        return torch.empty((), dtype=tensor.dtype).expand(tensor.shape)

    def _reduced(self, inputs: _List, op: int) -> Tensor:
        return self._value(inputs[0])

    def _gathered(self, inputs: _List) -> Tensor:
        return self._value(inputs[0])


def follow(
    computing: Computing, patches: Patches, unknown: Callable[[Tensor], None] | None
) -> None:
    """Compute what `torch.cuda.comm` and `torch.cuda.nccl` move with ``computing``. Without values
    (``unknown``) nothing is known of what they write.
    """
    from torch.cuda import nccl

    moves = Moves(computing)
    forgotten = moves if unknown is None else Forgotten(computing, unknown)
    for owner, name, method in (
        (torch._C, "_broadcast_coalesced", "coalesced"),
        (torch._C, "_broadcast", "broadcast"),
        (torch._C, "_broadcast_out", "broadcast"),
        (nccl, "all_reduce", "all_reduce"),
        (nccl, "reduce", "reduce"),
        (nccl, "broadcast", "nccl_broadcast"),
        (nccl, "all_gather", "all_gather"),
        (nccl, "reduce_scatter", "reduce_scatter"),
    ):
        before = getattr(owner, name, None)
        if before is not None:
            made = (getattr(one, method)(before) for one in (moves, forgotten))
            patches.set(owner, name, functools.wraps(before)(_either(computing, *made)))


def _either(
    computing: Computing, computed: Callable[..., Any], forgotten: Callable[..., Any]
) -> Callable[..., Any]:
    """Compute what a call moves if its arguments are known and values are computed."""

    def run(*args: Any, **kwargs: Any) -> Any:
        chosen = computed if computing.computes(args) else forgotten
        return chosen(*args, **kwargs)

    return run
