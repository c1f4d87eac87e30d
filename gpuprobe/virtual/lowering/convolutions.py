"""Convolutions: the memory that cuDNN's kernels work in.

Which kernel cuDNN picks is decided in its closed heuristics, and torch allocates whatever that
kernel asks for (``run_conv_plan`` in ``aten/src/ATen/native/cudnn/Conv_v8.cpp``), so that the size
is known as a range: nothing at least; at most what kernels on tensor cores can need.

* Copies of the tensors with channels last, in multiples of 16 bytes, where they are laid out
  otherwise: "Tensor Core Operations" in NVIDIA's cuDNN developer guide, and "Channels In And Out"
  and "Tensor Layouts In Memory" in its "Convolutional Layers User's Guide".
* One tile of float32 sums for each multiprocessor, where a sum is divided among several: CUTLASS's
  largest tile of 256 x 128, ``get_workspace_size`` in
  ``include/cutlass/gemm/threadblock/threadblock_swizzle_streamk.h``.
* The gradient of 16-bit weights in float32, before it is rounded.

Other kernels, such as those by Fourier transforms, can need more.
"""

from __future__ import annotations

import math
from typing import Any, Final

import torch

from gpuprobe.virtual.dispatch.calls import Call, OperatorRow

_ALIGNMENT: Final = 16
"""Bytes."""
_TILE: Final = 256 * 128 * 4
_LAST: Final = {4: torch.channels_last, 5: torch.channels_last_3d}
_SOURCE: Final = "aten/src/ATen/native/cudnn/Conv_v8.cpp: run_conv_plan; the module's docstring"


def copy_bytes(tensor: Any) -> int:
    """A copy with channels last, its channels a multiple of 16 bytes; 0 for one that is so."""
    if tensor is None or tensor.element_size() > 4:
        return 0
    channels, item = tensor.size(1), tensor.element_size()
    each = _ALIGNMENT // item
    padded = -(-channels // each) * each
    layout = _LAST.get(tensor.dim())
    if padded == channels and layout and tensor.is_contiguous(memory_format=layout):
        return 0
    return tensor.numel() // max(1, channels) * padded * item


def _tiles(call: Call) -> int:
    return call.device.model.multi_processor_count * _TILE


def _forward(call: Call) -> None:
    tensors = (call.argument("input"), call.argument("weight"), call.result)
    if torch.backends.cudnn.enabled:
        call.device.may_need(sum(map(copy_bytes, tensors)) + _tiles(call), call.stream)


def _backward(call: Call) -> None:
    if not torch.backends.cudnn.enabled:
        return
    dy, x, weight = (call.argument(name) for name in ("grad_output", "input", "weight"))
    dx, dw, *_ = call.result
    if dx is not None:
        copies = sum(map(copy_bytes, (dy, weight, dx)))
        call.device.may_need(copies + _tiles(call), call.stream)
    if dw is not None:
        wide = 4 * math.prod(dw.shape) if dw.element_size() < 4 else 0
        copies = sum(map(copy_bytes, (dy, x, dw)))
        call.device.may_need(copies + wide + _tiles(call), call.stream)


ROWS: Final = (
    OperatorRow(
        "convolution",
        "cuDNN's workspace: only a range is known, and estimates give ranges",
        _SOURCE,
        after=_forward,
    ),
    OperatorRow(
        "convolution_backward",
        "cuDNN's workspaces of both gradients: only a range is known, and estimates give ranges",
        _SOURCE,
        after=_backward,
    ),
)
