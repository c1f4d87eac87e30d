"""Workspaces of cuDNN's convolution plans: the model of `gpuprobe/native/runtime/cudnn_plans.c`.

That file has its origin, how well it fits, and the causes behind each formula. Both are kept equal
by `tests/native/test_parity.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Final

import torch

if TYPE_CHECKING:
    from torch import Tensor

FORWARD, BACKWARD_DATA, BACKWARD_FILTER = "forward", "backward data", "backward filter"
_TYPES: Final = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class Plan:
    """A convolution as cuDNN gets it: ``x`` is the input's side, ``w`` the filter, ``y`` the
    output's side, gradients or not. ``processors`` and ``major`` are the device's multiprocessors
    and major compute capability; ``tf32``: float32 may be computed with TF32.
    """

    operation: str
    x: Tensor
    w: Tensor
    y: Tensor
    padding: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    processors: int
    major: int
    tf32: bool
    channels_last: bool


def _parts(a: int, b: int) -> int:
    return -(-a // b)


class _Shape:
    """What the formulas need of a convolution; names as in cudnn_plans.c."""

    def __init__(self, plan: Plan) -> None:
        x, w, y = plan.x, plan.w, plan.y
        spatial = x.dim() - 2
        self.operation = plan.operation
        self.half = x.dtype != torch.float32
        self.last = plan.channels_last
        self.n, self.c, self.k = x.size(0), x.size(1), y.size(1)
        self.element = 4 if not self.half else 2
        self.processors = plan.processors
        self.tensor_cores = self.half or (plan.tf32 and plan.major >= 8)  # TF32 needs Ampere
        self.groups = self.c // w.size(1) if w.size(1) else 1
        filters = [w.size(i + 2) for i in range(spatial)]
        # torch gives cuDNN a convolution of one dimension as one of two, with a height of 1.
        self.pixels = prod(filters)
        self.inputs = prod(x.shape[2:])
        self.outputs = prod(y.shape[2:])
        self.extent = max(filters)
        self.step = max(plan.stride)
        self.dilated = any(one > 1 for one in plan.dilation)
        self.point = self.pixels == 1
        self.still = self.point and all(one == 1 for one in plan.stride) and not any(plan.padding)
        self.square = spatial == 2 and all(
            filters[i] == 3 and plan.stride[i] == 1 and plan.dilation[i] == 1 for i in range(2)
        )
        self.flat = spatial == 2 and x.size(2) > 1
        self.deep = spatial == 3 and not self.point
        self.height = y.size(2) if spatial == 2 else 0
        self.width = y.size(3) if spatial == 2 else 0
        pad = 16 // self.element if self.tensor_cores and self.groups == 1 else 1  # to 16 bytes
        channels, kernels = _parts(self.c, pad) * pad, _parts(self.k, pad) * pad
        self.x = self.n * self.inputs * channels * self.element
        self.y = self.n * self.outputs * kernels * self.element
        self.w = 0 if self.point else channels * kernels // self.groups * self.pixels * self.element

    @property
    def converted(self) -> int:
        """Bytes of input, output and filter with channels last."""
        return self.x + self.y + self.w + 16

    def partial_sums(self, most: int, steps: int, fewest: int) -> int:
        """Bytes of the partial sums of a filter's gradient, which up to ``most`` thread blocks
        compute, each for ``steps`` steps of 32 pixels or more.
        """
        rows = 64 if self.k <= 64 else 128
        columns = 64 if self.k <= 64 and self.c <= 128 else 128
        channels = self.c
        if channels < 128:
            channels = 4
            while channels < self.c:
                channels *= 2
        tiles = _parts(self.k, rows) * _parts(channels * self.pixels, columns)
        total = self.n * self.outputs // 32
        blocks = min(most // tiles, total // steps)
        if total < fewest or blocks < 2:
            return 0
        size = tiles * rows * columns if self.last else self.c * self.k * self.pixels
        return blocks * size * 4 + 516  # and a flag for each block

    def hopper(self) -> int:
        """Bytes for Hopper's kernels, chosen if there is work for four rounds."""
        forward = self.operation == FORWARD
        pixels, channels = (self.outputs, self.k) if forward else (self.inputs, self.c)
        enough = _parts(self.n * pixels, 128) * _parts(channels, 128) >= 4 * self.processors
        return 131 if enough else 0


def _channels_first(s: _Shape) -> int:
    if s.still:
        if s.operation != BACKWARD_FILTER:
            return 0
        return min(s.n * s.c * s.k * 4, s.converted)
    if s.operation == BACKWARD_FILTER:
        if s.c < 4 and not s.half:
            return 0
        sums = (
            s.partial_sums(s.processors // 2, 48, 256)
            if s.half
            else s.partial_sums(s.processors, 32, 0)
        )
        return s.converted + (sums + 131 if sums else 0)
    forward = s.operation == FORWARD
    if (s.c <= 4 and (forward or not s.half)) or (s.point and not s.half):
        return 0
    if forward and not s.half and s.flat and s.n >= 16 and s.c * s.pixels <= 1024:
        return s.x + s.w + 16
    return s.converted + s.hopper()


def _channels_last_forward(s: _Shape) -> int:
    vector = 16 // s.element
    if s.k < vector:
        return s.y + s.w + 147
    if not s.half and not s.point:
        if s.c <= 4 or s.extent >= 5 or s.step >= 4:
            return (s.n * s.inputs * s.c + s.c * s.k * s.pixels) * 4 + 16
        if s.c < vector:
            return s.x + s.w + 16
    return 0 if s.half else s.hopper()


def _channels_last_data(s: _Shape) -> int:
    vector = 16 // s.element
    if s.c < vector:
        return s.x + 147 if s.half else s.converted
    if s.k < vector:
        return s.y + s.w + 16
    if s.half:
        return 0 if s.point else s.hopper()
    return 131


def _channels_last_filter(s: _Shape) -> int:
    if s.still:
        pixels = max(1000 if s.half else 600, s.c * s.k // 80)
        blocks = min(
            s.n * s.outputs // pixels, 2 * s.processors // (_parts(s.k, 128) * _parts(s.c, 128))
        )
        return blocks * s.c * s.k * 4 + (272 if s.half else 256) if blocks > 1 else 0
    if not s.half and (s.extent >= 5 or s.dilated):
        return s.x + s.y + 432
    sums = s.partial_sums(s.processors, 8, 1024) if s.half else s.partial_sums(s.processors, 32, 0)
    vector = 16 // s.element
    size = sums + 147 if sums else 0
    size += s.x + s.w if s.c % vector else 0
    return size + (s.y + s.w if s.k % vector else 0)


_CHANNELS_LAST: Final = {
    FORWARD: _channels_last_forward,
    BACKWARD_DATA: _channels_last_data,
    BACKWARD_FILTER: _channels_last_filter,
}


def _without_tensor_cores(s: _Shape) -> int:
    winograd = 0
    if s.operation == BACKWARD_FILTER and s.square and s.c > 4:
        tiles = s.n * _parts(s.height, 4) * _parts(s.width, 4)  # 6x6 pixels for 4x4 of the output
        winograd = 36 * 4 * (tiles * (s.c + s.k) + s.c * s.k)
    if s.last:  # converted to channels first
        if s.operation == BACKWARD_DATA:
            return s.converted
        if s.operation == BACKWARD_FILTER:
            return s.converted + winograd if winograd and s.c >= 128 else 0
        small = s.extent >= 7 or s.c <= 4 or (s.c <= 16 and s.k <= 16)
        return 0 if small else s.converted
    if s.operation != BACKWARD_FILTER:
        return 0
    if winograd:
        return winograd
    strided = s.step > 1 and s.c >= 128 and s.extent <= 3
    return s.converted if s.deep or strided else 0


def workspace(plan: Plan, *, searched: bool = False) -> int:
    """Bytes of the workspace of a convolution's plan; ``searched``: what ``benchmark = True``
    allocates for all plans together, before it tries them.
    """
    if plan.x.dtype not in _TYPES or not plan.x.numel() or not plan.y.numel():
        return 0
    s = _Shape(plan)
    if s.groups > 1:
        depthwise = s.groups == s.c
        size = 0 if depthwise else s.x + s.y + (s.w if s.tensor_cores and not s.half else 0) + 64
    elif not s.tensor_cores:
        size = _without_tensor_cores(s)
    else:
        size = _CHANNELS_LAST[s.operation](s) if s.last else _channels_first(s)
    if not searched:
        return size
    sums = s.operation == BACKWARD_FILTER and s.half and not s.last and s.groups == 1
    return max(size, s.x + s.y + s.w + (s.processors * 256 * 128 * 4 if sums else 0))
