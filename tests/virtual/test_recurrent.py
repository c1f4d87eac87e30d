"""Modules whose weights move: recurrent networks into one buffer, as cuDNN has them; lazy ones."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
from torch import nn

import gpuprobe

NETWORKS = {
    "lstm": lambda: nn.LSTM(5, 7, 2, batch_first=True),
    "no bias": lambda: nn.LSTM(5, 7, bias=False),
    "projected": lambda: nn.LSTM(5, 7, proj_size=3),
    "both ways": lambda: nn.GRU(5, 7, bidirectional=True),
    "plain": lambda: nn.RNN(5, 7, nonlinearity="relu"),
}


# oneDNN's word about its own limits; the values are computed all the same.
pytestmark = pytest.mark.filterwarnings("ignore:LSTM with projections:UserWarning")


@pytest.fixture(params=["real", "shapes"], autouse=True)
def session(request: pytest.FixtureRequest) -> Iterator[None]:
    torch.manual_seed(3)
    with gpuprobe.virtual_gpu("t4", request.param):
        yield


def rounded(tensors: list[torch.Tensor]) -> int:
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    return -(-size // 512) * 512


def storages(tensors: list[torch.Tensor]) -> int:
    return len({tensor.untyped_storage()._cdata for tensor in tensors})


@pytest.mark.parametrize("name", NETWORKS)
def test_weights_lie_in_one_buffer(name: str) -> None:
    host = NETWORKS[name]()
    network = copy.deepcopy(host).cuda()
    weights = list(network.parameters())
    assert torch.cuda.memory_allocated() == rounded(weights)
    assert storages(weights) == 1
    assert all(weight.is_cuda and weight.is_contiguous() for weight in weights)
    assert [w.shape for w in weights] == [w.shape for w in host.parameters()]
    # While they are moved, each has its own block beside the buffer.
    each = sum(rounded([weight]) for weight in weights)
    assert torch.cuda.max_memory_allocated() == each + rounded(weights)


@pytest.mark.parametrize("name", NETWORKS)
def test_gradients_lie_in_one_buffer(name: str) -> None:
    network = NETWORKS[name]().cuda()
    x = torch.randn(4, 6, 5, device="cuda")
    before = torch.cuda.memory_allocated()
    network(x)[0].sum().backward()
    gradients = [weight.grad for weight in network.parameters() if weight.grad is not None]
    assert len(gradients) == len(list(network.parameters()))
    assert storages(gradients) == 1
    assert torch.cuda.memory_allocated() - before == rounded(gradients)


def test_frozen_weights_have_no_gradients() -> None:
    network = nn.GRU(5, 7).cuda().requires_grad_(False)
    x = torch.randn(4, 6, 5, device="cuda", requires_grad=True)
    before = torch.cuda.memory_allocated()
    network(x)[0].sum().backward()
    assert x.grad is not None
    assert torch.cuda.memory_allocated() - before == rounded([x])


def test_a_network_that_trains_stays_flat() -> None:
    network = nn.LSTM(5, 7).cuda()
    optimizer = torch.optim.AdamW(network.parameters())
    for _ in range(2):
        optimizer.zero_grad()
        network(torch.randn(4, 6, 5, device="cuda"))[0].sum().backward()
        optimizer.step()
    assert storages(list(network.parameters())) == 1
    network.half()
    assert storages(list(network.parameters())) == 1
    assert torch.cuda.memory_allocated() > 0
    network.cpu()
    assert storages(list(network.parameters())) == 4


def test_values_stay_what_they_were(session: None) -> None:
    host = nn.LSTM(5, 7, 2)
    network = copy.deepcopy(host).cuda()
    for (name, one), (_, two) in zip(
        host.state_dict().items(), network.state_dict().items(), strict=True
    ):
        assert torch.equal(one, two.cpu()), name
    x = torch.randn(4, 6, 5)
    host(x)[0].square().sum().backward()
    network(x.cuda())[0].square().sum().backward()
    for one, two in zip(host.parameters(), network.parameters(), strict=True):
        assert one.grad is not None
        assert two.grad is not None
        torch.testing.assert_close(one.grad, two.grad.cpu())


def test_lazy_modules_find_their_shapes() -> None:
    network = nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d()).to("cuda").float()
    assert network(torch.randn(6, 3, device="cuda")).shape == (6, 4)
    assert all(weight.is_cuda for weight in network.parameters())
    assert nn.LazyLinear(2).cuda()(torch.randn(6, 3, device="cuda")).is_cuda
