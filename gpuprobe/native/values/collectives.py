"""Copies and sums between the devices of one process that NCCL makes, as for DataParallel.

They do not pass the dispatcher: the functions run, and the values are computed after them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from gpuprobe.errors import NotModelled
from gpuprobe.native.values.skipping import SKIP_DEVICE
from gpuprobe.patching import Patches

_SUM, _PRODUCT, _MAX, _MIN, _MEAN = range(5)  # ncclRedOp_t


def follow(mode: Any, patches: Patches) -> None:
    """Compute what `torch.cuda.comm` and `torch.cuda.nccl` move with ``mode``."""
    from torch.cuda import nccl

    below = mode.below

    def quiet(run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        before = mode.skipping.set(SKIP_DEVICE)
        try:
            return run(*args, **kwargs)
        finally:
            mode.skipping.set(before)

    def put(target: Any, value: Any) -> None:
        mode.aliases.of(target).copy_(value)

    def value_of(tensor: Any) -> Any:
        return mode.aliases.of(tensor) if tensor.is_cuda else tensor

    def replace(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        before = getattr(owner, name, None)
        if before is not None:
            patches.set(owner, name, functools.wraps(before)(make(before)))

    def coalesced(before: Any) -> Any:
        def broadcast_coalesced(tensors: Any, devices: Any, *rest: Any) -> Any:
            result = quiet(before, tensors, devices, *rest)
            with below():
                for made in result:
                    for target, source in zip(made, tensors, strict=True):
                        if target is not source:
                            put(target, value_of(source))
            return result

        return broadcast_coalesced

    def broadcast(before: Any) -> Any:
        def broadcast_one(tensor: Any, *rest: Any) -> Any:
            result = quiet(before, tensor, *rest)
            with below():
                for target in result:
                    put(target, value_of(tensor))
            return result

        return broadcast_one

    replace(torch._C, "_broadcast_coalesced", coalesced)
    replace(torch._C, "_broadcast", broadcast)
    replace(torch._C, "_broadcast_out", broadcast)

    def reduced(inputs: Any, op: int) -> Any:
        values = torch.stack([value_of(item) for item in inputs])
        if op == _SUM:
            return values.sum(0)
        if op == _PRODUCT:
            return values.prod(0)
        if op == _MEAN:
            return values.mean(0)
        if op in (_MAX, _MIN):
            return values.amax(0) if op == _MAX else values.amin(0)
        raise NotModelled(f"NCCL's reduction {op} is not computed")

    def all_reduce(before: Any) -> Any:
        def run(inputs: Any, outputs: Any = None, op: int = _SUM, *rest: Any) -> None:
            with below():
                value = reduced(inputs, op)
            quiet(before, inputs, outputs, op, *rest)
            with below():
                for target in inputs if outputs is None else outputs:
                    put(target, value)

        return run

    def reduce(before: Any) -> Any:
        def run(inputs: Any, output: Any = None, root: int = 0, op: int = _SUM, *rest: Any,
                **named: Any) -> None:  # fmt: skip
            with below():
                value = reduced(inputs, op)
            quiet(before, inputs, output, root, op, *rest, **named)
            old = named.get("outputs")
            target = output if output is not None else (old or inputs)[root]
            with below():
                put(target[root] if isinstance(target, (list, tuple)) else target, value)

        return run

    def nccl_broadcast(before: Any) -> Any:
        def run(inputs: Any, root: int = 0, *rest: Any) -> None:
            quiet(before, inputs, root, *rest)
            with below():
                for target in inputs:
                    if target is not inputs[root]:
                        put(target, value_of(inputs[root]))

        return run

    def all_gather(before: Any) -> Any:
        def run(inputs: Any, outputs: Any, *rest: Any) -> None:
            with below():
                value = torch.cat([value_of(item).flatten() for item in inputs])
            quiet(before, inputs, outputs, *rest)
            with below():
                for target in outputs:
                    put(target, value.view(target.shape))

        return run

    def reduce_scatter(before: Any) -> Any:
        def run(inputs: Any, outputs: Any, op: int = _SUM, *rest: Any) -> None:
            with below():
                value = reduced([item.flatten() for item in inputs], op)
            quiet(before, inputs, outputs, op, *rest)
            with below():
                for target, part in zip(outputs, value.chunk(len(outputs)), strict=True):
                    put(target, part.view(target.shape))

        return run

    replace(nccl, "all_reduce", all_reduce)
    replace(nccl, "reduce", reduce)
    replace(nccl, "broadcast", nccl_broadcast)
    replace(nccl, "all_gather", all_gather)
    replace(nccl, "reduce_scatter", reduce_scatter)
