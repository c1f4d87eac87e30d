"""Factories "like a tensor of a device" that are asked for host memory."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import gpuprobe


@pytest.fixture(params=["real", "shapes"])
def gpu(request: pytest.FixtureRequest) -> Iterator[None]:
    with gpuprobe.virtual_gpu("h100-80gb", compute=request.param):
        yield


@pytest.mark.usefixtures("gpu")
def test_the_device_that_was_asked_for() -> None:
    weight = torch.nn.Parameter(torch.ones(4, device="cuda"))
    before = torch.cuda.memory_allocated()
    made = [
        torch.empty_like(weight, device="cpu"),
        torch.zeros_like(input=weight, device=torch.device("cpu")),
        torch.full_like(weight, 2.0, device="cpu"),
        torch.rand_like(weight, device="cpu"),
        weight.new_zeros(4, device="cpu"),
        weight.new_empty((4,), device="cpu"),
        torch.empty_like(weight, device="cpu", pin_memory=True),
    ]
    assert [tensor.device.type for tensor in made] == ["cpu"] * len(made)
    assert [tensor.is_pinned() for tensor in made] == [False] * 6 + [True]
    assert torch.cuda.memory_allocated() == before
    assert made[0].pin_memory().is_pinned()
    assert torch.zeros_like(weight).device.type == "cuda"
    assert weight.new_ones(4, device="cuda").device.type == "cuda"
    assert torch.ones_like(weight, device="cpu", requires_grad=True).requires_grad
