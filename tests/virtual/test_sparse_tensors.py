"""Sparse tensors in shapes mode: the elements, the memory and the values of computing all."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from gpuprobe.virtual.session import VirtualSession
from torch import nn

import gpuprobe
from gpuprobe.errors import ValueNeeded

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's own, of layouts in beta


def coordinates() -> Any:
    """Three elements, two of them in the same place, of vectors."""
    values = torch.arange(12.0, device="cuda").view(3, 4)
    return torch.sparse_coo_tensor(torch.tensor([[0, 1, 1]], device="cuda"), values, (5, 4))


def matrix() -> Any:
    at = torch.tensor([[0, 1, 1], [0, 1, 2]], device="cuda")
    return torch.sparse_coo_tensor(at, torch.ones(3, device="cuda"), (5, 4))


def trained(make: Callable[[Any], torch.optim.Optimizer]) -> Any:
    table = nn.Embedding(1000, 8, sparse=True, device="cuda")
    optimizer = make(table.parameters())
    for _ in range(2):
        table(torch.tensor([1, 2, 1, 60], device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return table.weight


def bag(mode: str, sparse: bool, last: bool) -> Any:
    table = nn.EmbeddingBag(
        50, 6, mode=mode, sparse=sparse, include_last_offset=last, device="cuda"
    )
    offsets = torch.tensor([0, 3, 6] if last else [0, 3], device="cuda")
    table(torch.tensor([1, 2, 3, 4, 5, 6], device="cuda"), offsets).sum().backward()
    return table.weight.grad


def in_place() -> Any:
    kept = coordinates()
    kept.mul_(0.5)
    kept.add_(coordinates())
    return kept


CASES: dict[str, Callable[[], Any]] = {
    "clone": lambda: coordinates().clone(),
    "coalesce": lambda: coordinates().coalesce(),
    "add": lambda: coordinates() + coordinates(),
    "mul": lambda: coordinates() * 2,
    "in place": in_place,
    "to a dtype": lambda: coordinates().half(),
    "to dense": lambda: coordinates().to_dense(),
    "added to dense": lambda: torch.zeros(5, 4, device="cuda").add_(coordinates()),
    "product": lambda: torch.sparse.mm(matrix(), torch.ones(4, 3, device="cuda")),
    "rows": lambda: matrix().to_sparse_csr() @ torch.ones(4, 3, device="cuda"),
    "transposed": lambda: matrix().t().coalesce(),
    "joined": lambda: torch.cat([matrix(), matrix()]),
    "softmax": lambda: torch.sparse.softmax(matrix(), 1),
    "there and back": lambda: coordinates().cpu().cuda(),
    "Adam": lambda: trained(torch.optim.SparseAdam),
    "Adagrad": lambda: trained(torch.optim.Adagrad),
    "SGD": lambda: trained(torch.optim.SGD),
    **{
        f"bags, {mode}, {'sparse' if sparse else 'dense'}, {last}": functools.partial(
            bag, mode, sparse, last
        )
        for mode in ("sum", "mean", "max")
        for sparse in (False, True)
        for last in (False, True)
        if not (sparse and mode == "max")  # torch has no such gradient
    },
}


def run(case: Callable[[], Any], session: VirtualSession) -> tuple[Any, list[Any], list[Any]]:
    """The result on the host, what it looks like, and the sizes that were allocated."""
    events: list[Any] = []

    def listen(action: int, address: int, size: int, stream: int, pool: int) -> None:
        events.append((action, size))

    torch.manual_seed(0)
    gc.disable()
    try:
        session.machine.devices[0].listeners.append(listen)
        result = case()
    finally:
        gc.enable()
        session.machine.devices[0].listeners.remove(listen)
    parts = [result]
    if result.layout is torch.sparse_coo:
        parts = [result._values(), result._indices()]
    elif result.layout is torch.sparse_csr:
        parts = [result.values(), result.crow_indices(), result.col_indices()]
    looks = [(str(part.dtype), part.shape, part.stride(), str(part.device)) for part in parts]
    return result, looks, events


@pytest.fixture(params=[2**20, 0], ids=["known", "unknown"])
def limit(request: pytest.FixtureRequest) -> int:
    """The most bytes of floating point whose values are computed."""
    return int(request.param)


@pytest.mark.parametrize("name", CASES)
def test_elements_and_memory_are_those_of_computing_all(name: str, limit: int) -> None:
    with gpuprobe.virtual_gpu("a100-80gb") as session:
        result, looks, events = run(CASES[name], session)
        wanted = result.detach().cpu().to_dense()
    with gpuprobe.virtual_gpu("a100-80gb", "shapes") as session:
        session.machine.limits.floating = limit
        found, *others = run(CASES[name], session)
        assert others[0] == looks
        if name == "in place":  # its old values and indices are freed in another order
            events, others[1] = sorted(events), sorted(others[1])
        assert others[1] == events
        if limit:
            torch.testing.assert_close(found.detach().cpu().to_dense().tolist(), wanted.tolist())


def test_which_elements_there_are_is_known_or_asked_for() -> None:
    with gpuprobe.virtual_gpu("a100-80gb", "shapes") as session:
        session.machine.limits.floating = 0
        assert coordinates().coalesce()._nnz() == 2
        at = torch.randn(1, 3, device="cuda").argsort()  # unknown, as what it depends on
        made = torch.sparse_coo_tensor(at, torch.ones(3, device="cuda"), (5,))
        with pytest.raises(ValueNeeded, match="which elements of a sparse tensor there are"):
            made.coalesce()
