"""``torch.as_tensor`` and ``asarray`` of a tensor on the device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import gpuprobe


@pytest.fixture(params=["real", "shapes"], autouse=True)
def compute(request: Any) -> Iterator[None]:
    with gpuprobe.virtual_gpu("h100-80gb", compute=request.param):
        yield


@pytest.mark.parametrize("name", ["as_tensor", "asarray"])
@pytest.mark.parametrize("options", [{}, {"device": "cuda"}, {"dtype": torch.float32}], ids=str)
def test_the_same_device_and_dtype_share_memory(name: str, options: dict[str, Any]) -> None:
    tensor = torch.ones(1024, device="cuda")
    before = torch.cuda.memory_allocated()
    made = getattr(torch, name)(tensor, **options)
    assert torch.cuda.memory_allocated() == before
    assert made.is_cuda
    assert made.data_ptr() == tensor.data_ptr()


@pytest.mark.parametrize("name", ["as_tensor", "asarray"])
def test_another_device_or_dtype_is_a_copy(name: str) -> None:
    tensor = torch.ones(1024, device="cuda")
    before = torch.cuda.memory_allocated()
    make = getattr(torch, name)
    on_host = make(tensor, device="cpu")
    assert not on_host.is_cuda
    assert torch.cuda.memory_allocated() == before
    wide = make(tensor, dtype=torch.float64, device="cuda")
    assert wide.dtype is torch.float64
    assert torch.cuda.memory_allocated() - before == 8192


def test_gradients_flow_through_as_tensor_but_not_asarray() -> None:
    tensor = torch.ones(4, device="cuda", requires_grad=True)
    product = tensor * 2
    assert torch.as_tensor(product, device="cuda").requires_grad
    assert not torch.asarray(product, device="cuda").requires_grad
    assert torch.asarray(tensor.detach(), device="cuda", requires_grad=True).requires_grad


def test_asarray_copies_on_request() -> None:
    tensor = torch.ones(1024, device="cuda")
    before = torch.cuda.memory_allocated()
    copied = torch.asarray(tensor, device="cuda", copy=True)
    assert torch.cuda.memory_allocated() - before == 4096
    assert copied.data_ptr() != tensor.data_ptr()
