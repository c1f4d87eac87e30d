"""Mistakes in a program that a CUDA device reports, and the CPU does not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils.rnn import pack_padded_sequence

import gpuprobe


@pytest.fixture(params=["real", "shapes"])
def x(request: pytest.FixtureRequest) -> Iterator[Any]:
    with gpuprobe.virtual_gpu("a100-80gb", request.param):
        yield torch.ones(3, 3).cuda()


def _put(target: Any, index: Any, value: Any) -> None:
    target[index] = value


def _add(total: Any, value: Any) -> None:
    total += value


def _gradient(x: Any) -> None:
    weight = nn.Parameter(x)
    weight.grad = torch.ones(3, 3)


def _moved(x: Any) -> None:
    """The optimizer has its state on the host when the model leaves."""
    model = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    model.cuda()
    optimizer.zero_grad()
    model(x).sum().backward()
    optimizer.step()


MISTAKES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "a host tensor by device indices": (
        lambda x: torch.ones(3)[torch.tensor([0]).cuda()],
        r"indices should be either on cpu or on the same device as the indexed tensor \(cpu\)",
    ),
    "a number on the host to write a sum to": (
        lambda x: torch.sum(x, dim=(0, 1), out=torch.empty(())),
        "same device",
    ),
    "host values put into a device tensor": (
        lambda x: _put(x, torch.tensor([0]), torch.ones(1, 3)),
        "same device",
    ),
    "device values put into a host tensor": (
        lambda x: _put(torch.ones(3, 3), torch.tensor([0]), x[:1]),
        "same device",
    ),
    "a number on the host as a total": (lambda x: _add(torch.tensor(0.0), x.sum()), "same device"),
    "stacked losses": (lambda x: torch.stack([x.sum(), torch.tensor(0.0)]), "same device"),
    "device lengths": (
        lambda x: pack_padded_sequence(x[None], torch.tensor([3]).cuda(), batch_first=True),
        "'lengths' argument should be a 1D CPU int64 tensor, but got 1D cuda:0 Long tensor",
    ),
    "weights on the host": (
        lambda x: nn.LSTM(3, 3)(x),
        "Input and parameter tensors are not at the same device, found input tensor at cuda:0 and "
        "parameter tensor at cpu",
    ),
    "states on the host": (
        lambda x: nn.GRU(3, 3).cuda()(x, torch.zeros(1, 3)),
        "Input and hidden tensors",
    ),
    "keys on the host": (
        lambda x: F.scaled_dot_product_attention(x[None], torch.ones(1, 3, 3), torch.ones(1, 3, 3)),
        "Expected query, key, and value to have the same device type",
    ),
    "a mask on the host": (
        lambda x: F.scaled_dot_product_attention(
            x[None].half(), x[None].half(), x[None].half(), torch.zeros(3, 3).half()
        ),
        "same device",
    ),
    "a gradient on the host": (_gradient, "assigned grad has data located on a different device"),
    "lists in two places": (lambda x: torch._foreach_add([x], [torch.ones(3, 3)]), "same device"),
    "an optimizer's state left behind": (_moved, "same device"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_it_is_refused(x: Any, name: str) -> None:
    mistake, words = MISTAKES[name]
    with pytest.raises(RuntimeError, match=words):
        mistake(x)


def test_what_cuda_allows_is_not(x: Any) -> None:
    number = torch.tensor(2.0)
    assert x[torch.tensor([0])].is_cuda
    x[torch.tensor([0])] = number
    x[0] = torch.ones(3)
    x *= number
    assert (number * x).is_cuda
    assert (number + x.sum()).is_cuda
    assert torch._foreach_mul([x], number)[0].is_cuda
    torch._foreach_copy_([x], [torch.ones(3, 3)])
    weight = nn.Parameter(x)
    weight.grad = x.clone()
    weight.grad = None
    rows = x.clone().requires_grad_()
    (rows[torch.tensor([0, 1])].sum() + rows.index_put((torch.tensor([2]),), x[0]).sum()).backward()
    assert rows.grad is not None
    assert rows.grad.is_cuda


def _heads(dtype: torch.dtype = torch.half, length: int = 8) -> Any:
    return torch.ones(1, 2, length, 16, dtype=dtype, device="cuda")


NO_KERNEL: dict[str, tuple[SDPBackend, Callable[[], Any]]] = {
    "flash in single precision": (
        SDPBackend.FLASH_ATTENTION,
        lambda: F.scaled_dot_product_attention(*[_heads(torch.float)] * 3),
    ),
    "flash with a mask": (
        SDPBackend.FLASH_ATTENTION,
        lambda: F.scaled_dot_product_attention(
            *[_heads()] * 3, attn_mask=torch.ones(8, 8, dtype=torch.bool, device="cuda")
        ),
    ),
    "flash causal, of two lengths": (
        SDPBackend.FLASH_ATTENTION,
        lambda: F.scaled_dot_product_attention(
            _heads(), _heads(length=4), _heads(length=4), is_causal=True
        ),
    ),
    "flash of three dimensions": (
        SDPBackend.FLASH_ATTENTION,
        lambda: F.scaled_dot_product_attention(*[_heads()[0]] * 3),
    ),
    "efficient in double precision": (
        SDPBackend.EFFICIENT_ATTENTION,
        lambda: F.scaled_dot_product_attention(*[_heads(torch.double)] * 3),
    ),
    "cuDNN in single precision": (
        SDPBackend.CUDNN_ATTENTION,
        lambda: F.scaled_dot_product_attention(*[_heads(torch.float)] * 3),
    ),
}


@pytest.mark.parametrize("name", NO_KERNEL)
def test_an_attention_kernel_that_cannot_run(x: Any, name: str) -> None:
    backend, call = NO_KERNEL[name]
    with (
        sdpa_kernel(backend),
        pytest.warns(UserWarning, match="not used because"),
        pytest.raises(RuntimeError, match=r"^No available kernel\. Aborting execution\.$"),
    ):
        call()
    with sdpa_kernel([backend, SDPBackend.MATH]):
        call()


@pytest.mark.parametrize(
    "backend",
    [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION],
)
def test_an_attention_kernel_that_can_run(x: Any, backend: SDPBackend) -> None:
    with sdpa_kernel(backend):
        assert F.scaled_dot_product_attention(*[_heads()] * 3).is_cuda
