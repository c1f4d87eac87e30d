"""What ``torch.nn.DataParallel`` asks of C++: copies to and from several devices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch.utils._python_dispatch import _disable_current_modes

from gpuprobe.patching import Patches
from gpuprobe.virtual.machine import Machine


def install(machine: Machine, patches: Patches) -> None:
    """Source of each: ``torch/csrc/cuda/comm.cpp``."""

    def on(index: int) -> torch.device:
        return torch.device("cuda", index)

    def broadcast(tensor: Any, devices: Any) -> list[Any]:
        return [tensor.to(on(index)) for index in devices]

    def broadcast_coalesced(tensors: Any, devices: Any, buffer_size: int = 0) -> list[list[Any]]:
        first = list(tensors)
        return [
            first if place == 0 else [tensor.to(on(index)) for tensor in first]
            for place, index in enumerate(devices)
        ]

    def scatter(
        tensor: Any, devices: Any, chunk_sizes: Any, dim: int, streams: Any = None
    ) -> tuple[Any, ...]:
        devices = list(devices)
        chunks = (
            tensor.split(list(chunk_sizes), dim)
            if chunk_sizes is not None
            else tensor.chunk(len(devices), dim)
        )
        return tuple(chunk.to(on(index)) for chunk, index in zip(chunks, devices, strict=False))

    def gather(tensors: Any, dim: int, destination: Any = None) -> Any:
        if destination == -1:
            device = torch.device("cpu")
        elif destination is None:
            device = on(machine.local.device)
        else:
            device = on(destination)
        return torch.cat([tensor.to(device) for tensor in tensors], dim)

    def broadcast_out(tensor: Any, out: Any) -> list[Any]:
        for target in out:
            if target.data_ptr() != tensor.data_ptr():
                target.copy_(tensor)
        return list(out)

    def scatter_out(tensor: Any, out: Any, dim: int, streams: Any = None) -> list[Any]:
        chunks = tensor.split([target.size(dim) for target in out], dim)
        for chunk, target in zip(chunks, out, strict=True):
            target.copy_(chunk)
        return list(out)

    def gather_out(tensors: Any, out: Any, dim: int) -> Any:
        for tensor, part in zip(
            tensors, out.split([t.size(dim) for t in tensors], dim), strict=True
        ):
            part.copy_(tensor)
        return out

    _nccl(machine, patches)
    patches.set_each(
        torch._C,
        {
            "_broadcast": broadcast,
            "_broadcast_coalesced": broadcast_coalesced,
            "_scatter": scatter,
            "_gather": gather,
            "_broadcast_out": broadcast_out,
            "_scatter_out": scatter_out,
            "_gather_out": gather_out,
        },
    )


_REDUCE: Final[dict[int, Callable[[Any, Any], Any]]] = {
    0: torch.Tensor.add_,
    1: torch.Tensor.mul_,
    2: lambda total, other: torch.maximum(total, other, out=total),
    3: lambda total, other: torch.minimum(total, other, out=total),
}
"""By NCCL's number of the operation: ``ncclRedOp_t``. 4 is the mean."""
_SUM, _MEAN = 0, 4


def _nccl(machine: Machine, patches: Patches) -> None:
    """``torch.cuda.nccl``: one process, several GPUs. Results go to tensors that the caller has,
    and nothing is allocated on a GPU. Source: ``torch/csrc/cuda/python_nccl.cpp``.
    """

    def reduced(inputs: Any, op: int) -> Any:
        """In host memory, what the inputs come to."""
        total = inputs[0].clone()
        for other in inputs[1:]:
            _REDUCE[_SUM if op == _MEAN else op](total, other)
        return total.div_(len(inputs)) if op == _MEAN else total

    def quietly(function: Callable[..., None]) -> Callable[..., None]:
        def call(*args: Any) -> None:
            machine.use.use()
            with torch.no_grad(), machine.dispatch.below(), _disable_current_modes():
                function(*args)

        return call

    def all_reduce(inputs: Any, outputs: Any, op: int, *rest: Any) -> None:
        total = reduced(inputs, op)
        for output in outputs:
            output.copy_(total)

    def reduce(inputs: Any, output: Any, root: int, op: int, *rest: Any) -> None:
        output.copy_(reduced(inputs, op))

    def broadcast(inputs: Any, root: int, *rest: Any) -> None:
        for place, tensor in enumerate(inputs):
            if place != root:
                tensor.copy_(inputs[root])

    def all_gather(inputs: Any, outputs: Any, *rest: Any) -> None:
        flat = torch.cat([tensor.reshape(-1) for tensor in inputs])
        for output in outputs:
            output.copy_(flat.view(output.shape))

    def reduce_scatter(inputs: Any, outputs: Any, op: int, *rest: Any) -> None:
        parts = reduced(inputs, op).reshape(-1).chunk(len(outputs))
        for output, part in zip(outputs, parts, strict=True):
            output.copy_(part.view(output.shape))

    patches.set_each(
        torch._C,
        {
            "_nccl_all_reduce": quietly(all_reduce),
            "_nccl_reduce": quietly(reduce),
            "_nccl_broadcast": quietly(broadcast),
            "_nccl_all_gather": quietly(all_gather),
            "_nccl_reduce_scatter": quietly(reduce_scatter),
        },
    )
