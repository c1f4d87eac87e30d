"""Operators whose parts, or extra memory, a dispatch mode does not see."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import allocation_events
import pytest
import torch
from torch.nn import functional as F

import gpuprobe

pytestmark = pytest.mark.filterwarnings("ignore")

ROWS, WIDTH = 512, 1024
COUNT = ROWS * WIDTH
WHOLE, ROW = COUNT * 4, ROWS * 4


@pytest.fixture(params=["real", "shapes"])
def gpu(request: pytest.FixtureRequest) -> Any:
    with gpuprobe.virtual_gpu("h100-80gb", request.param):
        yield request.param


def events(call: Callable[[], Any]) -> list[int]:
    """What is small is left out."""
    return allocation_events.events(call, least=ROW)


def tensor(requires_grad: bool = False) -> torch.Tensor:
    return torch.randn(ROWS, WIDTH, device="cuda", requires_grad=requires_grad)


def test_a_sum_of_exponentials(gpu: str) -> None:
    """The largest of each row, and all differences from it."""
    x = tensor(requires_grad=True)
    assert events(lambda: x.logsumexp(1)) == [ROW, ROW, -ROW, WHOLE, ROW, -WHOLE, -ROW]
    assert x.logsumexp(1, keepdim=True).shape == (ROWS, 1)
    assert x.logsumexp((0, 1)).shape == ()


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_binary_cross_entropy_of_logits(gpu: str, reduction: str) -> None:
    x, target = tensor(requires_grad=True), tensor().sigmoid()
    found = events(lambda: F.binary_cross_entropy_with_logits(x, target, reduction=reduction))
    assert found == ([WHOLE] * 2 + [-WHOLE] * (1 if reduction == "none" else 2))


def test_weights_of_positive_examples(gpu: str) -> None:
    x, target = tensor(), tensor().sigmoid()
    positive = torch.ones(WIDTH, device="cuda")
    found = events(lambda: F.binary_cross_entropy_with_logits(x, target, pos_weight=positive))
    small = WIDTH * 4
    assert found == [WHOLE, small, WHOLE, -small, -WHOLE, WHOLE, -WHOLE, -WHOLE]


def test_a_logarithm_of_a_sigmoid_keeps_no_buffer(gpu: str) -> None:
    x = tensor(requires_grad=True)
    assert events(lambda: F.logsigmoid(x)) == [WHOLE]
    y = F.logsigmoid(x)
    grad = torch.ones_like(y)
    assert events(lambda: torch.autograd.grad(y, x, grad, retain_graph=True)) == [WHOLE]


def test_distances_by_a_matrix_product(gpu: str) -> None:
    x = torch.randn(ROWS, 62, device="cuda")
    result, norm, padded = ROWS * ROWS * 4, ROWS * 4, ROWS * 64 * 4
    found = [size for size in events(lambda: torch.cdist(x, x)) if size < 10 * result]
    assert found.count(padded) == 2
    assert found.count(norm) == 4
    assert found.count(result) == 1


def test_which_are_infinite(gpu: str) -> None:
    x = tensor()
    assert events(lambda: x.isinf()) == [WHOLE, COUNT, -WHOLE]


def test_dimensions_are_rolled_one_by_one(gpu: str) -> None:
    x = tensor()
    assert events(lambda: x.roll(3, 0)) == [WHOLE]
    assert events(lambda: x.roll((3, 4), (0, 1))) == [WHOLE, WHOLE, -WHOLE]
    assert events(lambda: x.t().roll(3, 0)) == [WHOLE, WHOLE, -WHOLE]


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_a_huber_loss(gpu: str, reduction: str) -> None:
    x, y = tensor(), tensor()
    found = events(lambda: F.huber_loss(x, y, reduction=reduction))
    assert found[:1] == [WHOLE]
    assert sum(found) == (WHOLE if reduction == "none" else 0)


def test_gradients_of_bags_are_those_of_embeddings(gpu: str) -> None:
    """But for the number of indices from which on they are sorted, and the grouping by bags."""
    weight = torch.randn(100, 16, device="cuda", requires_grad=True)
    indices = torch.randint(0, 100, (5000,), device="cuda")
    offsets = torch.arange(0, 5000, 10, device="cuda")

    def backward(result: torch.Tensor) -> list[int]:
        grad = torch.ones_like(result)
        return events(lambda: torch.autograd.grad(result, weight, grad, retain_graph=True))

    single = backward(F.embedding(indices, weight))
    assert len(single) > 5
    for mode in ("sum", "mean"):
        assert backward(F.embedding_bag(indices, weight, offsets, mode=mode)) == single
    largest = F.embedding_bag(indices, weight, offsets, mode="max")
    assert len(backward(largest)) < len(single)


def test_elements_by_a_mask_are_counted(gpu: str) -> None:
    x, source = tensor(), tensor()
    mask = torch.ones(ROWS, 1, dtype=torch.bool, device="cuda")
    counts = [8 * COUNT, COUNT, -COUNT, -8 * COUNT]
    assert events(lambda: x.masked_scatter_(mask, source)) == counts
    assert events(lambda: x.masked_scatter(mask, source)) == [WHOLE, *counts]
    whole = mask.expand(ROWS, WIDTH).contiguous()
    assert events(lambda: x.masked_scatter_(whole, source)) == [8 * COUNT, -8 * COUNT]


VALUES: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "logsumexp": lambda x, y: x.logsumexp(1),
    "of infinities": lambda x, y: (x * float("-inf")).logsumexp((0, 1), keepdim=True),
    "of nothing": lambda x, y: x[:, :0].logsumexp(1),
    "of integers": lambda x, y: x.round().long().logsumexp(0),
    "bce": lambda x, y: F.binary_cross_entropy_with_logits(x, y.sigmoid()),
    "bce, weights": lambda x, y: F.binary_cross_entropy_with_logits(
        x, y.sigmoid(), y.abs(), reduction="none", pos_weight=y[0].abs()
    ),
    "logsigmoid": lambda x, y: F.logsigmoid(x) * y,
    "cdist": lambda x, y: torch.cdist(x, y, compute_mode="use_mm_for_euclid_dist"),
    "roll": lambda x, y: x.roll((1, 2), (0, 1)) * y,
    "huber": lambda x, y: F.huber_loss(x, y),
    "isinf": lambda x, y: (x / 0).isinf().float() + x,
}


@pytest.mark.parametrize("name", VALUES)
def test_values_and_gradients_are_those_of_a_cpu(name: str) -> None:
    def run(device: str) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(3)
        x = torch.randn(6, 5, generator=generator).to(device).requires_grad_()
        y = torch.randn(6, 5, generator=generator).to(device)
        result = VALUES[name](x, y)
        found = [result.detach()]
        if result.requires_grad and name != "of infinities":
            found += torch.autograd.grad(result.sum(), x, allow_unused=True)
        return [item.cpu() for item in found if item is not None]

    expected = run("cpu")
    with gpuprobe.virtual_gpu("h100-80gb"):
        torch.testing.assert_close(run("cuda"), expected, equal_nan=True)
        torch.testing.assert_close(run("cpu"), expected, equal_nan=True)
