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


ROWS: Final = (
    OperatorRow(
        "where.self",
        "a number chosen from: a tensor of one element on the device",
        "aten/src/ATen/native/TensorCompare.cpp: where_self_out; a public snapshot of an A100",
        before=_scalars_moved,
    ),
)
