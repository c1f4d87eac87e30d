"""Memory formats of convolutions are those of cuDNN, whether values are computed or not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import gpuprobe

LAST, LAST_3D = torch.channels_last, torch.channels_last_3d


def r(*shape: int) -> Any:
    return torch.randn(*shape, device="cuda")


CASES: dict[str, tuple[Callable[[], Any], tuple[int, ...]]] = {
    "contiguous": (lambda: F.conv2d(r(2, 8, 6, 6), r(4, 8, 3, 3)), (64, 16, 4, 1)),
    "image": (
        lambda: F.conv2d(r(2, 8, 6, 6).to(memory_format=LAST), r(4, 8, 3, 3)),
        (64, 1, 16, 4),
    ),
    "weight": (
        lambda: F.conv2d(r(2, 8, 6, 6), r(4, 8, 3, 3).to(memory_format=LAST)),
        (64, 1, 16, 4),
    ),
    "tokens seen as an image": (
        lambda: F.conv2d(
            r(2, 36, 8).transpose(1, 2).view(2, 8, 6, 6), r(8, 1, 3, 3), padding=1, groups=8
        ),
        (288, 1, 48, 8),
    ),
    "permuted": (
        lambda: F.conv2d(r(6, 2, 8, 6).permute(1, 2, 3, 0), r(4, 8, 3, 3)),
        (64, 16, 4, 1),
    ),
    "transposed": (
        lambda: F.conv_transpose2d(r(2, 8, 6, 6).to(memory_format=LAST), r(8, 4, 3, 3)),
        (256, 1, 32, 4),
    ),
    "one dimension": (
        lambda: F.conv1d(r(2, 9, 8).transpose(1, 2), r(4, 8, 3), padding=1),
        (36, 9, 1),
    ),
    "one dimension, one channel": (
        lambda: F.conv1d(r(2, 9, 1).transpose(1, 2), r(8, 1, 3), padding=1),
        (72, 1, 8),
    ),
    "three dimensions": (
        lambda: F.conv3d(r(2, 8, 4, 6, 6).to(memory_format=LAST_3D), r(4, 8, 3, 3, 3)),
        (128, 1, 64, 16, 4),
    ),
}


@pytest.mark.parametrize("compute", ["real", "shapes"])
def test_results_have_cudas_strides(compute: Any) -> None:
    with gpuprobe.virtual_gpu("t4", compute):
        found = {name: program().stride() for name, (program, _) in CASES.items()}
    assert found == {name: strides for name, (_, strides) in CASES.items()}


def test_double_precision_is_contiguous_as_in_cudnn() -> None:
    with gpuprobe.virtual_gpu("t4", "shapes"):
        image = r(2, 8, 6, 6).double().to(memory_format=LAST)
        assert F.conv2d(image, r(4, 8, 3, 3).double()).stride() == (64, 16, 4, 1)
