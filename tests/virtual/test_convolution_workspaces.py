"""cuDNN's workspaces of convolutions: as much as the native engine's model of them allocates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import pytest
import torch
from oracle import measured
from oracle_sizes import calls
from torch import nn

import gpuprobe

BLOCK: Final = 512

NATIVE: Final = {
    "conv 0: conv2d bfloat16 n32 c3 k192 62x62 r5 s4 p2 d1 g1": 12538368,
    "conv 1: conv2d tf32 n1 c256 k64 100x100 r1 s1 p0 d1 g1": 15491072,
    "conv 2: conv1d bfloat16 n1 c320 k64 485 r4 s1 p0 d1 g1": 1134592,
    "conv 6: conv2d tf32 channels-last n3 c32 k192 13x13 r7 s1 p3 d1 g1 bias no-grad": 1658880,
    "conv 11: conv3d tf32 channels-last n64 c4 k320 7x7x7 r7 s2 p0 d1 g1": 2704896,
    "conv 18: conv2d float32 n3 c4 k4 141x141 r3 s4 p0 d1 g4": 1072640,
    "conv 19: conv2d bfloat16 channels-last n1 c96 k128 170x170 r3 s1 p0 d1 g1": 20220928,
    "conv 21: conv2d float16 channels-last n1 c4 k32 166x166 r4 s1 p2 d1 g1": 4244992,
    "conv 25: conv2d float16 n4 c1024 k192 116x116 r1 s1 p0 d1 g1 no-grad": 20668416,
    "conv 36: conv_transpose2d tf32 channels-last n4 c64 k128 77x77 r3 s1 p1 d1 g1": 32716800,
    "conv 48: conv3d float16 n8 c96 k32 14x14x14 r3 s1 p0 d1 g1 no-grad": 6150656,
    "conv 61: conv2d float32 channels-last n2 c64 k192 159x159 r4 s4 p2 d1 g4 bias": 33457664,
    "conv 68: conv_transpose2d bfloat16 n64 c4 k256 3x3 r3 s2 p1 d1 g1 bias": 2527232,
    "conv 72: conv_transpose1d float32 n8 c96 k64 2220 r7 s1 p3 d1 g1": 16084992,
    "conv 430: conv_transpose3d bfloat16 n64 c4 k192 6x6x6 r1 s1 p0 d2 g1 bias": 10925568,
}
"""Calls of `oracle_sizes`, and their highest memory on the native engine, torch 2.13.0+cu130, in
bytes of blocks: ``oracle.py collect FILE --engine native --sizes --only ^conv``."""


def highest(call: Callable[[], Any]) -> int:
    call()  # ``benchmark = True`` compares plans in the first one
    live = most = 0
    for size, *_ in measured(call)["events"]:
        blocks = -(-abs(size) // BLOCK) * BLOCK
        live += blocks if size > 0 else -blocks
        most = max(most, live)
    return most


@pytest.mark.parametrize("name", NATIVE)
def test_a_convolution_takes_as_much_as_natively(name: str) -> None:
    make = calls()[name]
    flags = torch.backends.cudnn.flags(enabled=True, allow_tf32=True)  # the call sets its own
    with gpuprobe.virtual_gpu("h100-80gb", "shapes", engine="virtual"), flags:
        assert highest(make()) == NATIVE[name]


def extra(benchmark: bool, enabled: bool = True) -> int:
    """Bytes that a second forward pass takes beyond its result."""
    with (
        gpuprobe.virtual_gpu("h100-80gb", "shapes", engine="virtual"),
        torch.backends.cudnn.flags(enabled=enabled, benchmark=benchmark),
        torch.no_grad(),
    ):
        layer = nn.Conv2d(64, 64, 3, padding=1, bias=False).to("cuda", torch.bfloat16)
        x = torch.randn(8, 64, 32, 32, device="cuda", dtype=torch.bfloat16)
        layer(x)
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        out = layer(x)
        return torch.cuda.max_memory_allocated() - before - out.numel() * out.element_size()


def test_without_cudnn_there_is_no_workspace() -> None:
    assert extra(benchmark=False) > 0
    assert extra(benchmark=False, enabled=False) == 0


def test_plans_are_compared_once() -> None:
    assert extra(benchmark=True) == extra(benchmark=False)


def test_an_estimate_names_the_model() -> None:
    model: list[Any] = []

    def step() -> None:
        if not model:
            model.append(nn.Conv2d(3, 8, 3).cuda())
        model[0](torch.randn(8, 3, 64, 64, device="cuda")).sum().backward()

    found = gpuprobe.estimate(step, gpu="h100-80gb", engine="virtual")
    assert found.allocated_low == found.peak_allocated == found.allocated_high
    assert [text for text in found.assumed if "cuDNN's workspaces" in text]


def test_large_output_padding_counts_as_another_operator() -> None:
    def step() -> None:
        x = torch.randn(2, 4, 16, 16, 16, device="cuda", requires_grad=True)
        weight = torch.randn(4, 4, 3, 3, 3, device="cuda")
        out = nn.functional.conv_transpose3d(x, weight, stride=1, output_padding=1, dilation=2)
        out.sum().backward()

    found = gpuprobe.estimate(step, gpu="h100-80gb", engine="virtual")
    assert [text for text in found.assumed if "slow_conv_transpose3d" in text]
