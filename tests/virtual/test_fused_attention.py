"""CUDA's fused attention: the host's results, what CUDA's kernels allocate, and those who call the
operators behind ``scaled_dot_product_attention`` themselves.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import gpuprobe
from gpuprobe.torch_support.version import installed

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's own

WIDTH, HEADS, LENGTH = 16, 4, 7


def _attended(device: str, mask: str, drop: float, causal: bool, grouped: bool) -> list[Any]:
    """The result, the gradients and, of a device, its stride, its node and the peak."""
    numbers = torch.Generator().manual_seed(1)
    dtype = torch.float32 if mask else torch.float16

    def given(*shape: int) -> Any:
        made = torch.randn(shape, generator=numbers).to(dtype).to(device)
        return made.transpose(1, 2).detach().requires_grad_()

    heads = HEADS // 2 if grouped else HEADS
    tensors = [given(2, LENGTH, count, WIDTH) for count in (HEADS, heads, heads)]
    added = None
    if mask == "bool":
        added = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril(2).to(device)
    elif mask:
        added = torch.randn(2, HEADS, LENGTH, LENGTH, generator=numbers).to(device)
        added.requires_grad_(mask == "grad")
    torch.manual_seed(3)
    result = F.scaled_dot_product_attention(*tensors, added, drop, causal, enable_gqa=grouped)
    (result.float() ** 2).sum().backward()
    found = [result, *(item.grad for item in tensors)]
    if mask == "grad":
        assert added is not None
        found.append(added.grad)
    return [*(item.detach() for item in found), result.stride(), result.grad_fn.name()]


CASES = [
    (mask, drop, causal, False)
    for mask, drop, causal in itertools.product(("", "bool", "grad"), (0.0, 0.5), (False, True))
    if not (mask and causal)
] + [("", 0.0, True, True)]


@pytest.mark.parametrize("gpu", ["h100-80gb", "a100-80gb"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_results_are_the_hosts_and_peaks_the_same_in_both_modes(case: Any, gpu: str) -> None:
    wanted = _attended("cpu", *case)
    seen = []
    for compute in ("real", "shapes"):
        with gpuprobe.virtual_gpu(gpu, compute=compute):
            *found, stride, node = _attended("cuda", *case)
            seen.append((stride, node, torch.cuda.max_memory_allocated()))
            if compute == "real":
                for one, other in zip(found, wanted, strict=False):
                    assert torch.equal(one.cpu(), other)
    assert seen[0] == seen[1]
    half = "Cudnn" if gpu == "h100-80gb" and installed() >= (2, 11) else "Flash"
    assert ("Efficient" if case[0] else half) in seen[0][1]


@pytest.fixture(params=["real", "shapes"])
def compute(request: Any) -> Iterator[str]:
    with gpuprobe.virtual_gpu("h100-80gb", compute=request.param):
        yield request.param


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_jagged_sequences(compute: str, dtype: torch.dtype) -> None:
    parts = [torch.randn(length, 2 * WIDTH).to(dtype) for length in (3, 5, 2)]

    def attended(rows: Any) -> Any:
        split = rows.unflatten(-1, [2, WIDTH]).transpose(-3, -2)
        return F.scaled_dot_product_attention(split, split, split)

    jagged = torch.nested.nested_tensor(
        [part.cuda() for part in parts], layout=torch.jagged, requires_grad=True
    )
    result = attended(jagged)
    (result.values().float() ** 2).sum().backward()
    assert result.device == torch.device("cuda", 0)
    assert jagged.grad is not None
    if compute == "shapes":
        return
    found = result.transpose(1, 2).values().cpu().split([3, 5, 2])
    grads = jagged.grad.values().cpu().split([3, 5, 2])
    for part, out, grad in zip(parts, found, grads, strict=True):
        alone = part.clone().requires_grad_()
        wanted = attended(alone[None])[0].transpose(0, 1)
        (wanted.float() ** 2).sum().backward()
        torch.testing.assert_close(out, wanted.detach())
        torch.testing.assert_close(grad, alone.grad, atol=2e-3, rtol=2e-3)  # of three sums


def test_sequences_one_after_the_other(compute: str) -> None:
    """``_flash_attention_forward`` aligns a causal mask at the last query and key."""
    if compute == "shapes" and installed() < (2, 7):
        pytest.skip("torch 2.6 has other sums (of the longest sequence) by its rule for shapes")
    lengths = ((2, 5), (4, 4))
    rows, columns = (sum(pair[at] for pair in lengths) for at in range(2))
    query, key = (torch.randn(n, 2, WIDTH, device="cuda").half() for n in (rows, columns))
    ends = [
        torch.tensor([0, a, a + b], dtype=torch.int32).cuda() for a, b in zip(*lengths, strict=True)
    ]
    out, sums, state, _, _ = torch.ops.aten._flash_attention_forward(
        query, key, key, *ends, 4, 5, 0.0, True, False
    )
    assert (out.shape, sums.shape, state.shape) == (query.shape, (2, rows), (2,))
    assert {tensor.device.type for tensor in (out, sums, state)} == {"cuda"}
    if compute == "shapes":
        return
    q, k = query[:2].float().cpu(), key[:5].float().cpu()
    scores = torch.einsum("qhd,khd->hqk", q, k) * WIDTH**-0.5
    scores.masked_fill_(torch.ones(2, 5).tril(3) == 0, float("-inf"))
    wanted = torch.einsum("hqk,khd->qhd", scores.softmax(-1), k)
    torch.testing.assert_close(out[:2].float().cpu(), wanted, atol=2e-3, rtol=2e-3)
    torch.testing.assert_close(sums[:, :2].cpu(), scores.logsumexp(-1), atol=2e-3, rtol=2e-3)


def test_the_backward_pass_draws_what_its_own_forward_pass_drew() -> None:
    with gpuprobe.virtual_gpu("h100-80gb"):
        value = torch.eye(8, device="cuda").half()[None, None].requires_grad_()
        query = torch.zeros_like(value)
        results = [
            F.scaled_dot_product_attention(query, query, value, dropout_p=0.5) for _ in range(3)
        ]
        assert not torch.equal(results[0], results[1])
        for result in results:
            (grad,) = torch.autograd.grad(result.sum(), value)
            # Every row of the result is its row of weights: each key's are summed up.
            assert torch.equal(grad[..., 0], result.sum(-2))
