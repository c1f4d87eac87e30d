"""Reductions: the buffers of those that are split over several blocks, the copy that is summed
where types differ, norms of many tensors as ``clip_grad_norm_`` takes them, and normalisation over
groups and rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Final

import torch

from gpuprobe.virtual.dispatch.calls import Call, OperatorRow
from gpuprobe.virtual.lowering.reduce_config import Reduction, launches

_CHUNK: Final = 65536  # elements, kChunkSize in MultiTensorApply.cuh
_LOW: Final = (torch.float16, torch.bfloat16)
_SPLIT: Final = "where an output is split over several blocks: partial results, then semaphores"
_GROUP_NORM: Final = "aten/src/ATen/native/cuda/group_norm_kernel.cu"
_LAYER_NORM: Final = "aten/src/ATen/native/cuda/layer_norm_kernel.cu"
_REDUCE: Final = "aten/src/ATen/native/cuda/Reduce.cuh: setReduceConfig, gpu_reduce_kernel"


def _dims(call: Call, rank: int) -> tuple[int, ...]:
    wanted: Any = call.argument("dim")
    if wanted is None or (isinstance(wanted, (list, tuple)) and not wanted):
        return tuple(range(rank))
    if isinstance(wanted, int):
        wanted = (wanted,)
    return tuple(dim % rank if rank else 0 for dim in wanted)


def _take(call: Call, tensor: torch.Tensor, item: int, accumulator: int, vector: int = 4) -> None:
    """Buffers of the reduction of ``tensor``, whose elements have ``item`` bytes when read."""
    if tensor.layout is not torch.strided:
        return
    reduction = Reduction(
        tuple(tensor.shape),
        tensor.stride(),
        _dims(call, tensor.dim()),
        item,
        accumulator,
        vector,
    )
    split(call, reduction)


def split(call: Call, reduction: Reduction) -> None:
    """Buffers of a reduction that is split over several blocks."""
    model = call.device.model
    *before, last = launches(
        reduction, model.multi_processor_count, model.max_threads_per_multi_processor
    )
    for sizes in before:
        with ExitStack() as stack:
            for nbytes in sizes:
                stack.enter_context(call.held(nbytes))
    for nbytes in last:
        call.scratch(nbytes)


def whole(call: Call, count: int, item: int) -> None:
    """Buffers for the sum of so many numbers of ``item`` bytes that lie side by side."""
    split(call, Reduction((count,), (1,), (0,), item, max(item, 4), 4))


def _summed(call: Call) -> None:
    """Sums in the type of the result: ``make_reduction`` copies an input of another type first,
    but for half precision summed in float.
    """
    tensor, result = call.args[0], call.result
    dtype = tensor.dtype
    if result.dtype != dtype and not (dtype in _LOW and result.dtype == torch.float32):
        dtype = result.dtype
        call.scratch(tensor.numel() * result.element_size())
    _take(call, tensor, dtype.itemsize, max(dtype.itemsize, 4))


def _compared(call: Call) -> None:
    """Values are carried in their own type: largest, smallest, any, all."""
    tensor = call.args[0]
    _take(call, tensor, tensor.element_size(), tensor.element_size())


def _both(call: Call) -> None:
    """A smallest and a largest value."""
    tensor = call.args[0]
    _take(call, tensor, tensor.element_size(), 2 * tensor.element_size())


def _with_index(call: Call) -> None:
    """A pair of a value (half precision as float) and a 64-bit index, padded: 16 bytes."""
    tensor = call.args[0]
    _take(call, tensor, tensor.element_size(), 16)


def _variance(call: Call) -> None:
    """``WelfordData``: mean and squares, a 32-bit count and the count as a number."""
    tensor = call.args[0]
    size = tensor.element_size()
    _take(call, tensor, size, 16 if size <= 4 else 32, 2)


def _foreach_norm(call: Call) -> None:
    """Partial norms: one for each chunk of each tensor."""
    tensors = call.args[0]
    floating = [tensor for tensor in tensors if tensor.dtype.is_floating_point]
    if not floating or len({tensor.dtype for tensor in floating}) > 1:
        return
    chunks = max(-(-tensor.numel() // _CHUNK) for tensor in floating)
    item = 8 if floating[0].dtype is torch.float64 else 4
    call.scratch(len(floating) * chunks * item)


def _accumulated(tensor: torch.Tensor) -> int:
    """Bytes of a number of the type that half precision is accumulated in."""
    return 4 if tensor.dtype in _LOW else tensor.element_size()


def _group_norm(call: Call) -> None:
    """A factor and a summand for each channel of each sample."""
    tensor, weight, bias, batch, channels, length = call.args[:6]
    if length == 1 or (weight is None and bias is None):
        return
    for _ in range(2):
        call.scratch(batch * channels * _accumulated(tensor))


def _group_norm_backward(call: Call) -> None:
    """Sums of the gradient for each channel of each sample, then the coefficients of the input's
    gradient: for each group, and for each channel where there are weights.
    """
    tensor, weight = call.args[1], call.args[4]
    batch, channels, length, groups, wanted = call.args[5:10]
    item = _accumulated(tensor)
    if length != 1:
        for _ in range(2):
            call.scratch(batch * channels * item)
    if wanted[0]:
        for _ in range(2):
            call.scratch(batch * groups * item)
        if weight is not None and length != 1:
            call.scratch(batch * channels * item)


def _norm_backward(call: Call) -> None:
    """The gradient of the result contiguous; then, of many short rows, partial sums of those of the
    weights (since torch 2.8), and their sums in new memory.
    """
    call.contiguous("grad_out")
    tensor, shape, wanted = call.args[1], call.args[2], call.argument("output_mask")
    length = math.prod(shape)
    if call.machine.torch < (2, 8) or not length:
        return
    rows, across = tensor.numel() // length, -(-length // _WARP)
    if rows <= _MANY_ROWS or length // _WARP >= call.device.model.multi_processor_count // 2:
        return
    down = min(_MOST_BLOCKS // across, -(-rows // _ROWS_PER_BLOCK))
    parameters = [call.argument(name) for name in ("weight", "bias")]
    summed = [
        (given.element_size(), 4 if given.dtype in _LOW else given.element_size())
        for given, needed in zip(parameters, wanted[1:], strict=False)
        if needed and given is not None
    ]
    for item, _ in summed:
        call.scratch(down * length * item)
    for item, accumulator in summed:
        call.scratch(length * item)
        split(call, Reduction((down, length), (length, 1), (0,), item, accumulator, 4))


_WARP: Final = 32
_MANY_ROWS: Final = 64 * 1024
_MOST_BLOCKS: Final = 32 * 1024
_ROWS_PER_BLOCK: Final = 32


def _rows(run: Callable[[Call], None], *names: str) -> tuple[OperatorRow, ...]:
    return tuple(OperatorRow(name, _SPLIT, _REDUCE, after=run) for name in names)


ROWS: Final = (
    *_rows(_summed, "sum", "nansum", "mean", "prod", "linalg_vector_norm"),
    *_rows(_compared, "amax", "amin", "any", "all", "max.default", "min.default"),
    *_rows(_both, "aminmax"),
    *_rows(_with_index, "argmax", "argmin", "max.dim", "min.dim"),
    *_rows(_variance, "var.correction", "std.correction", "var_mean.correction"),
    *_rows(_variance, "std_mean.correction"),
    OperatorRow(
        "_foreach_norm",
        "a partial norm for every chunk of 65,536 elements of every tensor",
        "aten/src/ATen/native/cuda/ForeachReduceOp.cu: foreach_tensor_norm_cuda",
        before=_foreach_norm,
    ),
    *(
        OperatorRow(
            name,
            "arguments that are not contiguous are copied",
            f"{_LAYER_NORM}: layer_norm_cuda, _fused_rms_norm_cuda",
            before=lambda call: call.contiguous("input", "weight", "bias"),
        )
        for name in ("native_layer_norm", "_fused_rms_norm")
    ),
    *(
        OperatorRow(
            name,
            "arguments that are not contiguous are copied; of more than 65,536 short rows, partial "
            "sums of the gradients of the weights",
            f"{_LAYER_NORM}: LaunchGammaBetaBackwardCUDAKernel",
            before=lambda call: call.contiguous("input", "weight", "bias"),
            after=_norm_backward,
        )
        for name in ("native_layer_norm_backward", "_fused_rms_norm_backward")
    ),
    OperatorRow(
        "native_group_norm",
        "with weights: a factor and a summand for every channel of every sample",
        f"{_GROUP_NORM}: GroupNormKernelImplInternal",
        after=_group_norm,
    ),
    OperatorRow(
        "native_group_norm_backward",
        "two sums for every channel of every sample, coefficients of the gradient; equal to the "
        "published peaks of a B200 (`benchmarks/published_peaks.py`)",
        f"{_GROUP_NORM}: GroupNormBackwardKernelImplInternal, GroupNorm1dBackward",
        after=_group_norm_backward,
    ),
)
