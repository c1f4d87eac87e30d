"""Convolutions: copies in cuDNN's layout, and the workspaces of its plans.

torch passes cuDNN contiguous tensors, with channels last if the input or the weight is so, and
allocates what the plan of cuDNN's heuristics requests (``run_conv_plan`` in
``aten/src/ATen/native/cudnn/Conv_v8.cpp``) for the time of its call. The sizes are those of the
native engine's model, which was fitted to measurements (`cudnn_convolutions`, next to this file).
"""

from __future__ import annotations

from typing import Any, Final
from weakref import WeakKeyDictionary

import torch

from gpuprobe.virtual.dispatch.calls import Call, OperatorRow
from gpuprobe.virtual.lowering.cudnn_convolutions import (
    BACKWARD_DATA,
    BACKWARD_FILTER,
    FORWARD,
    Plan,
    workspace,
)
from gpuprobe.virtual.lowering.reduce import split
from gpuprobe.virtual.lowering.reduce_config import Reduction
from gpuprobe.virtual.values import convolution_format

_SOURCE: Final = "aten/src/ATen/native/cudnn/Conv_v8.cpp: run_conv_plan; the module's docstring"
_ASSUMED: Final = (
    "that cuDNN's workspaces of convolutions are those of a model fitted to an H200: NVIDIA does "
    "not document which kernel it picks"
)
_searched: Final[WeakKeyDictionary[Any, set[Any]]] = WeakKeyDictionary()
"""The convolutions of each device for which ``benchmark = True`` has compared plans."""


def _uses_cudnn(call: Call, image: Any, weight: Any) -> bool:
    """``ConvParams::use_cudnn`` in ``aten/src/ATen/native/Convolution.cpp``. Depthwise convolutions
    in float32 have kernels of torch's own, too, but cuDNN's need no workspace either.
    """
    enabled = torch.backends.cudnn.enabled and image.numel() and weight.numel()
    return bool(enabled) and not _is_output_padding_big(call)


def _is_output_padding_big(call: Call) -> bool:
    padded, stride = call.argument("output_padding"), call.argument("stride")
    return any(extra >= step for extra, step in zip(padded, stride, strict=False))


def _note_slow(call: Call, *tensors: Any) -> None:
    """A transposed convolution with an output padding as large as the stride runs in
    ``slow_conv_transpose2d`` or ``3d``, whose buffers are not modelled: it counts as an operator of
    that name.
    """
    if torch.backends.cudnn.enabled and _is_output_padding_big(call):
        size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        name = f"aten.slow_conv_transpose{max(tensors[0].dim() - 2, 2)}d.default"
        call.machine.called.note(name, size)


def _copied(tensor: Any, layout: torch.memory_format) -> int:
    """Bytes of a tensor's copy in cuDNN's layout, 0 if it is in that layout."""
    if tensor.is_contiguous(memory_format=layout):
        return 0
    return int(tensor.numel() * tensor.element_size())


def _bytes(call: Call, operation: str, x: Any, w: Any, y: Any, layout: torch.memory_format) -> int:
    model = call.device.model
    spatial = x.dim() - 2

    def numbers(name: str) -> tuple[int, ...]:
        given = call.argument(name)
        return tuple(given) if len(given) == spatial else tuple(given) * spatial

    plan = Plan(
        operation,
        x,
        w,
        y,
        numbers("padding"),
        numbers("stride"),
        numbers("dilation"),
        model.multi_processor_count,
        model.capability[0],
        torch.backends.cudnn.allow_tf32,
        layout is not torch.contiguous_format,
    )
    call.machine.assume(_ASSUMED)
    return workspace(plan, searched=torch.backends.cudnn.benchmark and _is_new(call, plan))


def _is_new(call: Call, plan: Plan) -> bool:
    """Whether plans for such a convolution have not been compared yet (``BenchmarkCache``)."""
    tensors = [(tuple(t.shape), t.dtype) for t in (plan.x, plan.w, plan.y)]
    key = (plan.operation, *tensors, plan.padding, plan.stride, plan.dilation, plan.channels_last)
    known = _searched.setdefault(call.device, set())
    new = key not in known
    known.add(key)
    return new


def _before_forward(call: Call) -> None:
    image, weight = call.argument("input"), call.argument("weight")
    _note_slow(call, image, weight)
    if _uses_cudnn(call, image, weight):
        call.scratch(_copied(image, convolution_format(image, weight)))


def _after_forward(call: Call) -> None:
    image, weight = call.argument("input"), call.argument("weight")
    if not _uses_cudnn(call, image, weight):
        return
    layout = convolution_format(image, weight)
    with call.held(_copied(weight, layout)):
        if call.argument("transposed"):
            call.passing(_bytes(call, BACKWARD_DATA, call.result, weight, image, layout))
        else:
            call.passing(_bytes(call, FORWARD, image, weight, call.result, layout))


def _before_backward(call: Call) -> None:
    """The gradients of input and weight are computed one after the other, each with its copies and
    its workspace, before the bias's has memory (``cudnn_convolution_backward`` in
    ``aten/src/ATen/native/cudnn/ConvShared.cpp``; order as seen on the native engine).
    """
    grad, image, weight = (call.argument(name) for name in ("grad_output", "input", "weight"))
    _note_slow(call, image, weight, grad)
    if not _uses_cudnn(call, image, weight):
        return
    layout = convolution_format(image, weight)
    of_image, of_weight, _ = call.argument("output_mask")
    transposed = call.argument("transposed")
    copy = _copied(grad, layout)
    # A transposed convolution has one copy of the result's gradient for both.
    of_both, of_each = (copy, 0) if transposed else (0, copy)
    with call.held(_copied(image, layout) if of_weight else 0), call.held(of_both):
        if of_image:
            call.for_result(image.numel() * image.element_size())
            with call.held(_copied(weight, layout)), call.held(of_each):
                if transposed:
                    call.passing(_bytes(call, FORWARD, grad, weight, image, layout))
                else:
                    call.passing(_bytes(call, BACKWARD_DATA, image, weight, grad, layout))
        if of_weight:
            with call.held(of_each):
                call.for_result(weight.numel() * weight.element_size())
                x, y = (grad, image) if transposed else (image, grad)
                call.passing(_bytes(call, BACKWARD_FILTER, x, weight, y, layout))


def _after_backward(call: Call) -> None:
    grad, image, weight = (call.argument(name) for name in ("grad_output", "input", "weight"))
    if _uses_cudnn(call, image, weight) and call.argument("output_mask")[2]:
        split(call, _over_all_but_channels(grad))


def _over_all_but_channels(grad: Any) -> Reduction:
    """The gradient of the bias: the sum of the result's gradient for each channel."""
    item = grad.element_size()
    dims = (0, *range(2, grad.dim()))
    return Reduction(tuple(grad.shape), grad.stride(), dims, item, max(item, 4), 4)


ROWS: Final = (
    OperatorRow(
        "convolution",
        "contiguous copies, and cuDNN's workspace for the time of the call",
        _SOURCE,
        before=_before_forward,
        after=_after_forward,
    ),
    OperatorRow(
        "convolution_backward",
        "contiguous copies, and cuDNN's workspaces, one gradient after the other",
        _SOURCE,
        before=_before_backward,
        after=_after_backward,
    ),
)
