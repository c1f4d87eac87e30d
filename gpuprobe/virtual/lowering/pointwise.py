"""Pointwise operators that take more than their result."""

from __future__ import annotations

from typing import Final

import torch

from gpuprobe.virtual.dispatch.calls import Call, OperatorRow


def _scalars_moved(call: Call) -> None:
    """``where`` moves numbers and tensors without dimensions from the host, in the type of the
    result.
    """
    choices = [call.argument("self"), call.argument("other")]
    item = torch.result_type(*choices).itemsize
    for tensor in choices:
        if not tensor.dim() and call.machine.place_of(tensor) < 0:
            call.scratch(item)


def _product(call: Call) -> None:
    """The gradient times the output, in memory of its own."""
    grad, output = call.args[:2]
    call.scratch(grad.numel() * torch.result_type(grad, output).itemsize)


ROWS: Final = (
    OperatorRow(
        "where.self",
        "a number chosen from: a tensor of one element on the device",
        "aten/src/ATen/native/TensorCompare.cpp: where_self_out; a public snapshot of an A100",
        before=_scalars_moved,
    ),
    OperatorRow(
        "_softmax_backward_data",
        "the gradient times the output; equal to published peaks of an RTX 3090 "
        "(`benchmarks/published_peaks.py`)",
        "aten/src/ATen/native/cuda/SoftMax.cu: softmax_backward_cuda_out",
        after=_product,
    ),
)
