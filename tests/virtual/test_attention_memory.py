"""What attention allocates, forward and backward: the sizes that torch's own CUDA code allocated on
the native engine with torch 2.13, in order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import gpuprobe
from gpuprobe.torch_support.version import installed

pytestmark = pytest.mark.skipif(installed() < (2, 11), reason="an earlier torch picks others")

HOPPER, AMPERE = "h100-80gb", "a100-80gb"
FULL, HALF = torch.float32, torch.float16


def _allocated(call: Callable[[], Any]) -> tuple[Any, list[int]]:
    """The result of the second call, and what that allocated."""
    call()
    torch.cuda.memory._record_memory_history(max_entries=1000)
    result = call()
    traces = torch.cuda.memory._snapshot()["device_traces"][0]
    torch.cuda.memory._record_memory_history(enabled=None)
    return result, [event["size"] for event in traces if event["action"] == "alloc"]


def _tensor(heads: int, length: int, width: int, dtype: torch.dtype, *, heads_first: bool) -> Any:
    """Of shape (2, heads, length, width), in memory as a projection makes it, or contiguous."""
    if heads_first:
        made = torch.empty(2, heads, length, width, dtype=dtype, device="cuda")
    else:
        made = torch.empty(2, length, heads, width, dtype=dtype, device="cuda").transpose(1, 2)
    return made.requires_grad_()


CASES = [
    # GPU, type, contiguous, gradient, (length, keys, width, width of values), dropout, mask; the
    # forward pass in any order, the backward pass
    ((HOPPER, FULL, False, "like", (40, 40, 32, 32), 0.0, ""), None,
     [40960, 40960, 40960, 40960, 1280, 1280, 131200]),
    ((HOPPER, FULL, False, "other", (40, 40, 32, 32), 0.0, ""), None,
     [40960, 40960, 40960, 40960, 40960, 1280, 1280, 131200]),
    ((HOPPER, FULL, True, "like", (1, 1, 32, 32), 0.0, ""), None,
     [1024, 1024, 1024, 1024, 32, 131200]),
    ((HOPPER, HALF, False, "like", (40, 40, 32, 32), 0.0, ""), [8, 8, 20480, 1280, 256],
     [20480, 20480, 20480, 42496]),
    ((HOPPER, HALF, True, "expanded", (40, 40, 32, 32), 0.0, ""), [8, 8, 20480, 1280, 256],
     [20480, 20480, 20480, 20480, 42496]),
    ((HOPPER, HALF, True, "like", (40, 33, 32, 32), 0.0, "bool"),
     [2, 2, 5280, 8, 8, 20480, 1280, 256], [20480, 16896, 16896, 42496]),
    ((HOPPER, HALF, False, "like", (40, 40, 192, 128), 0.0, ""), [8, 8, 81920, 1280, 256],
     [122880, 122880, 81920, 247296]),
    ((HOPPER, HALF, True, "like", (40, 40, 32, 32), 0.1, ""), [20480, 1280, 16, 8, 16],
     [20480, 20480, 20480, 20480, 20480, 4096, 131072]),
    ((HOPPER, HALF, False, "like", (40, 1, 32, 32), 0.0, ""), [20480, 1280, 16, 8],
     [20480, 512, 512, 4096, 131072]),
    ((AMPERE, HALF, False, "like", (40, 40, 192, 128), 0.0, ""), [81920, 2048, 163840], None),
    ((AMPERE, HALF, False, "like", (40, 33, 32, 32), 0.0, "bool"),
     [2, 2, 5280, 6400, 20480, 2048], None),
]  # fmt: skip


@pytest.mark.parametrize("compute", ["real", "shapes"])
@pytest.mark.parametrize(("case", "forward", "backward"), CASES, ids=str)
def test_sizes_are_those_of_torch(
    case: Any, forward: list[int] | None, backward: list[int] | None, compute: str
) -> None:
    gpu, dtype, heads_first, gradient, (length, keys, width, values), dropout, mask = case
    with gpuprobe.virtual_gpu(gpu, compute=compute):
        query, key, value = (
            _tensor(4, *sizes, dtype, heads_first=heads_first)
            for sizes in ((length, width), (keys, width), (keys, values))
        )
        added = torch.ones(2, 1, length, keys, dtype=torch.bool, device="cuda") if mask else None
        out, found = _allocated(
            lambda: F.scaled_dot_product_attention(query, key, value, added, dropout)
        )
        if forward is not None:
            assert sorted(found) == sorted(forward)
        if gradient == "other":
            grad = _tensor(4, length, values, dtype, heads_first=not heads_first).detach()
        elif gradient == "expanded":
            grad = torch.ones((), dtype=dtype, device="cuda").expand_as(out)
        else:
            grad = torch.ones_like(out)
        inputs = (query, key, value)
        _, found = _allocated(lambda: torch.autograd.grad(out, inputs, grad, retain_graph=True))
        if backward is not None:
            assert found == backward


@pytest.mark.parametrize("keys", [16, 33, 1004])
def test_a_mask_begins_rows_at_multiples_of_eight(keys: int) -> None:
    with gpuprobe.virtual_gpu(HOPPER, compute="shapes"):
        query = _tensor(4, 3, 32, FULL, heads_first=True)
        key = _tensor(4, keys, 32, FULL, heads_first=True)
        mask = torch.empty(2, 1, 3, keys, device="cuda")
        _, found = _allocated(lambda: F.scaled_dot_product_attention(query, key, key, mask))
    padded = {16: [], 33: [960], 1004: [24192]}[keys]
    assert found == [*padded, 3072, 1024]


def test_a_mask_of_another_type_is_refused() -> None:
    with gpuprobe.virtual_gpu(AMPERE, compute="shapes"):
        query = _tensor(4, 8, 32, HALF, heads_first=True)
        mask = torch.empty(8, 8, device="cuda")
        with pytest.raises(RuntimeError, match="invalid dtype for bias"):
            F.scaled_dot_product_attention(query, query, query, mask)


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        (FULL, [614400, 614400, 614400, 614400, 4800, 4800, 786816]),
        (HALF, [307200, 307200, 307200, 4800, 786624]),
    ],
    ids=str,
)
def test_the_kernel_called_directly(dtype: torch.dtype, expected: list[int]) -> None:
    with gpuprobe.virtual_gpu(HOPPER, compute="shapes"):
        query = torch.empty(2, 300, 2, 128, dtype=dtype, device="cuda").requires_grad_()
        out = torch.ops.aten._efficient_attention_forward(
            query, query, query, None, None, None, None, None, 0.0, 0, True
        )[0]
        grad = torch.ones_like(out)
        _, found = _allocated(lambda: torch.autograd.grad(out, (query,), grad, retain_graph=True))
    assert [size for size in found if size][: len(expected)] == expected


def test_only_cudnn_is_allowed() -> None:
    with gpuprobe.virtual_gpu(AMPERE, compute="shapes"), sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        query = _tensor(4, 40, 32, HALF, heads_first=False)
        _, found = _allocated(lambda: F.scaled_dot_product_attention(query, query, query))
    assert sorted(found) == [8, 8, 256, 1280, 20480]
