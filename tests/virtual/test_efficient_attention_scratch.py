"""What the backward pass of memory-efficient attention needs: bytes beyond its results that torch's
own CUDA code allocated on the native engine, with torch 2.13.
"""

from __future__ import annotations

import pytest
import torch
from gpuprobe.virtual.lowering.attention import efficient_backward_scratch

HOPPER, AMPERE, TURING = (9, 0), (8, 6), (7, 5)
FULL, HALF = torch.float32, torch.float16


@pytest.mark.parametrize(
    ("capability", "dtype", "shape", "keys", "width", "measured"),
    [
        (HOPPER, FULL, (1, 1, 10), 10, 16, 17408),
        (HOPPER, FULL, (1, 1, 100), 10, 16, 33792),
        (HOPPER, FULL, (1, 1, 10), 10, 72, 66560),
        (HOPPER, FULL, (1, 1, 300), 600, 128, 198656),
        (HOPPER, FULL, (1, 1, 300), 600, 200, 395264),
        (HOPPER, FULL, (3, 4, 65), 129, 32, 397312),
        (HOPPER, HALF, (1, 1, 300), 600, 64, 83968),
        (HOPPER, HALF, (1, 1, 300), 600, 128, 198656),
        (HOPPER, HALF, (1, 1, 10), 10, 136, 230400),
        (HOPPER, HALF, (1, 1, 300), 600, 200, 1705984),
        (AMPERE, FULL, (1, 1, 300), 600, 128, 165888),
        (AMPERE, HALF, (1, 1, 10), 10, 72, 66560),
        (AMPERE, HALF, (1, 1, 300), 600, 128, 821248),
        (TURING, FULL, (1, 1, 10), 10, 136, 50176),
        (TURING, HALF, (1, 1, 300), 600, 128, 198656),
        (TURING, HALF, (1, 1, 10), 10, 256, 263168),
    ],
)
def test_bytes_are_those_of_torch(
    capability: tuple[int, int],
    dtype: torch.dtype,
    shape: tuple[int, int, int],
    keys: int,
    width: int,
    measured: int,
) -> None:
    query = torch.empty(*shape, width, dtype=dtype, device="meta")
    key = torch.empty(*shape[:2], keys, width, dtype=dtype, device="meta")
    sizes = efficient_backward_scratch(capability, query, key, key, False)
    assert sum(-(-size // 512) * 512 for size in sizes) == measured
