"""Which stream's memory work takes, as torch's notes on streams and the backward pass have it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import gpuprobe

SIZE = 8 << 20  # elements: a segment of its own


@pytest.fixture(params=["real", "shapes"], autouse=True)
def device(request: pytest.FixtureRequest) -> Iterator[None]:
    with gpuprobe.virtual_gpu("a100-80gb", request.param):
        yield


def stream_of(tensor: Any) -> int:
    """The stream of the segment in which a tensor lies."""
    address = tensor.data_ptr()
    for segment in torch.cuda.memory_snapshot():
        if segment["address"] <= address < segment["address"] + segment["total_size"]:
            return int(segment["stream"])
    raise AssertionError("no segment holds the tensor")


def test_a_stream_chosen_within_backward_holds() -> None:
    side = torch.cuda.Stream()
    x = torch.ones(SIZE, device="cuda", requires_grad=True)
    found = []

    def hook(grad: Any) -> None:
        found.append(stream_of(grad + 1))
        with torch.cuda.stream(side):
            found.append(stream_of(grad + 1))
        found.append(stream_of(grad + 1))

    y = x * 2
    y.register_hook(hook)
    y.sum().backward()
    assert found == [0, side.stream_id, 0]


def test_a_stream_chosen_in_a_function_of_the_programs_own_holds() -> None:
    side = torch.cuda.Stream()
    made = []

    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            with torch.cuda.stream(side):
                made.append(grad * 2)
            return made[-1]

    x = torch.ones(SIZE, device="cuda", requires_grad=True)
    torch.autograd.grad(Double.apply(x).sum(), x)
    assert stream_of(made[0]) == side.stream_id


def test_a_backward_pass_within_another_leaves_the_outer_ones_streams() -> None:
    side = torch.cuda.Stream()
    x = torch.ones(SIZE, device="cuda", requires_grad=True)
    found = []

    def hook(grad: Any) -> None:
        with torch.cuda.stream(side), torch.enable_grad():
            torch.autograd.grad((x[:2] * 2).sum(), x)
            found.append(stream_of(grad + 1))

    y = x * 2
    y.register_hook(hook)
    y.sum().backward()
    assert found == [side.stream_id]


def test_backward_runs_on_the_stream_of_forward() -> None:
    side = torch.cuda.Stream()
    x = torch.ones(SIZE, device="cuda", requires_grad=True)
    with torch.cuda.stream(side):
        y = (x * 2).exp()
    (grad,) = torch.autograd.grad(y.sum(), x)
    assert stream_of(grad) == side.stream_id
