"""Convolutions of tensors that are not contiguous: copies, results and workspaces in CUDA's order.

The order decides which cached block each of them gets, and so how large a peak is.
"""

from __future__ import annotations

from typing import Any, Final

import pytest
import torch

import gpuprobe

COPY_X, COPY_W, COPY_Y = 276480, 41472, 552960  # input, weight, output: bytes in float32
GRAD_X, GRAD_W, RESULT, GRAD_B = COPY_X, COPY_W, COPY_Y, 192
FORWARD, DATA, FILTER = 870928, 870928, 954519  # workspaces


def passing(size: int) -> list[int]:
    return [size, -size]


NATIVE: Final = {
    "input and weight": (
        ("x", "w"),
        [COPY_X, RESULT, COPY_W, *passing(FORWARD), -COPY_W, -COPY_X],
        [
            *[COPY_X, GRAD_X, COPY_W, *passing(DATA), -COPY_W],
            *[GRAD_W, *passing(FILTER), -COPY_X, GRAD_B],
        ],
    ),
    "gradient": (
        ("y",),
        [RESULT, *passing(FORWARD)],
        [
            *[GRAD_X, COPY_Y, *passing(DATA), -COPY_Y],
            *[COPY_Y, GRAD_W, *passing(FILTER), -COPY_Y, GRAD_B],
        ],
    ),
    "all three": (
        ("x", "w", "y"),
        [COPY_X, RESULT, COPY_W, *passing(FORWARD), -COPY_W, -COPY_X],
        [
            *[COPY_X, GRAD_X, COPY_W, COPY_Y, *passing(DATA), -COPY_Y, -COPY_W],
            *[COPY_Y, GRAD_W, *passing(FILTER), -COPY_Y, -COPY_X, GRAD_B],
        ],
    ),
    "all three, transposed": (
        ("x", "w", "y"),
        [COPY_X, RESULT, COPY_W, *passing(FORWARD), -COPY_W, -COPY_X],
        [
            *[COPY_X, COPY_Y, GRAD_X, COPY_W, *passing(DATA), -COPY_W],
            *[GRAD_W, *passing(FILTER), -COPY_Y, -COPY_X, GRAD_B],
        ],
    ),
}
"""The tensors that are not contiguous, and what the native engine allocates and frees (negative) in
a forward and a backward call, with torch 2.13.0+cu130.
"""


def tensor(shape: tuple[int, ...], contiguous: bool) -> Any:
    if contiguous:
        return torch.empty(shape, device="cuda")
    return torch.empty((*shape[:-2], shape[-1], shape[-2]), device="cuda").transpose(-1, -2)


def events(call: Any) -> list[int]:
    torch.cuda.memory._record_memory_history(max_entries=1000)
    kept = call()
    trace = torch.cuda.memory._snapshot()["device_traces"][0]
    torch.cuda.memory._record_memory_history(enabled=None)
    del kept
    signs = {"alloc": 1, "free_completed": -1}
    return [signs[e["action"]] * e["size"] for e in trace if e["action"] in signs]


@pytest.mark.parametrize("name", NATIVE)
def test_order_is_that_of_cuda(name: str) -> None:
    strided, forward, backward = NATIVE[name]
    transposed = "transposed" in name
    with (
        gpuprobe.virtual_gpu("h100-80gb", "shapes", engine="virtual"),
        torch.backends.cudnn.flags(enabled=True, allow_tf32=True),
    ):
        x = tensor((2, 24, 40, 36), "x" not in strided)
        w = tensor((24, 48, 3, 3) if transposed else (48, 24, 3, 3), "w" not in strided)
        grad = tensor((2, 48, 40, 36), "y" not in strided)
        run = torch.nn.functional.conv_transpose2d if transposed else torch.nn.functional.conv2d
        assert events(lambda: run(x, w, padding=1)) == forward
        one = [1, 1]
        found = events(
            lambda: torch.ops.aten.convolution_backward(
                grad, x, w, [48], one, one, one, transposed, [0, 0], 1, [True, True, True]
            )
        )
        assert found == backward


def test_nothing_is_left_of_a_convolution_that_did_not_fit() -> None:
    with gpuprobe.virtual_gpu("h100-80gb", "shapes", engine="virtual"):
        torch.cuda.set_per_process_memory_fraction(0.001)  # 79.2 MiB
        x = torch.empty(1, 8, 512, 512, device="cuda")
        w = torch.empty(8, 8, 3, 3, device="cuda")
        fill = torch.empty(50 << 20, dtype=torch.uint8, device="cuda")
        before = torch.cuda.memory_allocated()
        with pytest.raises(torch.OutOfMemoryError):
            torch.ops.aten.convolution_backward(
                x, x, w, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [True, True, False]
            )
        assert torch.cuda.memory_allocated() == before
        del fill
