"""Pointwise operators that take more than their result, and losses, which keep the memory of what
they sum up, and need as much again to do so.
"""

from __future__ import annotations

import math
from typing import Any, Final

import torch

from gpuprobe.virtual.dispatch.calls import Call, OperatorRow
from gpuprobe.virtual.lowering.reduce import whole


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
    """The gradient times the output, in memory of its own, laid out like the gradient; then what
    `Call.contiguous` copies of both.
    """
    grad, output = call.args[:2]
    size = grad.numel() * torch.result_type(grad, output).itemsize
    call.scratch(size)
    if not grad.is_contiguous():
        call.scratch(size)
    call.contiguous("output")


def _reduces(call: Call, at: int) -> bool:
    """Whether the losses are summed up. ``at``: the place of ``reduction`` in the schema."""
    if "reduction" in call.kwargs:
        return bool(call.kwargs["reduction"])
    return bool(call.args[at]) if at < len(call.args) else True


def _all_losses(call: Call) -> None:
    """All losses, if they are summed up."""
    if _reduces(call, 2):
        call.scratch(math.prod(_losses(call)))


def _sum_of_losses(call: Call) -> None:
    if _reduces(call, 2):
        whole(call, *_losses(call))


def _losses(call: Call) -> tuple[int, int]:
    """How many there are, and the bytes of each."""
    given, target = call.args[:2]
    shape = torch.broadcast_shapes(given.shape, target.shape)
    return shape.numel(), torch.result_type(given, target).itemsize


def _elementwise(call: Call) -> None:
    """A second tensor of all losses, and the sum of it in the result's memory."""
    _all_losses(call)
    _sum_of_losses(call)


def _copied_back(call: Call) -> None:
    """The sum in a tensor of its own, from which it is copied into the result."""
    if not _reduces(call, 3):
        return
    given: Any = call.args[0]
    call.scratch(given.element_size())
    whole(call, given.numel(), given.element_size())


ROWS: Final = (
    *(
        OperatorRow(
            name,
            "the result keeps the memory of all losses; a second tensor of them, which is summed",
            f"aten/src/ATen/native/Loss.cpp: TORCH_META_FUNC({name}), {name}_out",
            after=_elementwise,
        )
        for name in ("mse_loss", "smooth_l1_loss")
    ),
    OperatorRow(
        "huber_loss",
        "all losses, then the sum of them in new memory",
        "aten/src/ATen/native/Loss.cpp: huber_loss",
        before=_all_losses,
        after=_sum_of_losses,
    ),
    OperatorRow(
        "roll",
        "an argument that is not contiguous is copied",
        "aten/src/ATen/native/cuda/TensorTransformations.cu: roll_cuda",
        before=lambda call: call.contiguous("self"),
    ),
    OperatorRow(
        "binary_cross_entropy",
        "the result keeps the memory of all losses; their sum, which is copied into it",
        "aten/src/ATen/native/cuda/Loss.cu: binary_cross_entropy_out_cuda",
        after=_copied_back,
    ),
    OperatorRow(
        "where.self",
        "a number chosen from: a tensor of one element on the device",
        "aten/src/ATen/native/TensorCompare.cpp: where_self_out; a public snapshot of an A100",
        before=_scalars_moved,
    ),
    *(
        OperatorRow(
            name,
            "arguments that are not contiguous are copied",
            "aten/src/ATen/native/cuda/SoftMax.cu: host_softmax, host_softmax_backward",
            after=copies,
        )
        for name, copies in (
            ("_softmax", lambda call: call.contiguous("self")),
            ("_log_softmax", lambda call: call.contiguous("self")),
            ("_log_softmax_backward_data", lambda call: call.contiguous("grad_output", "output")),
        )
    ),
    OperatorRow(
        "_softmax_backward_data",
        "the gradient times the output; equal to published peaks of an RTX 3090 "
        "(`benchmarks/published_peaks.py`)",
        "aten/src/ATen/native/cuda/SoftMax.cu: softmax_backward_cuda_out",
        after=_product,
    ),
)
