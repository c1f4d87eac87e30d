"""What values may take is known before they are computed, and bounded: host memory first of all."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import gpuprobe
from gpuprobe.errors import UnknownValue
from gpuprobe.native import session
from gpuprobe.native.values import shapes
from gpuprobe.native.values.budget import temporary_memory
from gpuprobe.native.values.plans import plan_of
from gpuprobe.native.values.region_cost import RegionCost

pytestmark = pytest.mark.simulated

MIB = 1 << 20


def resident() -> int:
    """Bytes of this process in the host's memory."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * 4096


@pytest.mark.parametrize("compute", ["auto", "shapes"])
def test_large_whole_numbers_and_masks_take_no_host_memory(compute: str) -> None:
    with gpuprobe.virtual_gpu("t4", compute=compute):
        torch.zeros(1, device="cuda")
        before = resident()
        many = torch.zeros(1024 * MIB, dtype=torch.uint8, device="cuda")
        mask = many > 0
        places = torch.arange(256 * MIB, device="cuda")
        assert resident() - before < 128 * MIB
        for unknown in (mask, places):
            with pytest.raises(UnknownValue):
                unknown.sum().item()
        assert torch.arange(1000, device="cuda").sum().item() == 499500


def test_all_known_values_together_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shapes, "known_memory", lambda: 64 * MIB)
    with gpuprobe.virtual_gpu("t4", compute="shapes"):
        kept = [torch.ones(20 * MIB, dtype=torch.uint8, device="cuda") for _ in range(4)]
        assert [part.max().item() for part in kept[:3]] == [1, 1, 1]
        with pytest.raises(UnknownValue):
            kept[3].max().item()
        kept.clear()
        gc.collect()
        later = [torch.ones(20 * MIB, dtype=torch.uint8, device="cuda") for _ in range(20)]
        assert later[-1].numel() == 20 * MIB
        knowledge = session.active()._values.computing.knowledge  # type: ignore[union-attr]
        assert sum(map(knowledge.known, later)) == 3


def test_what_an_operator_takes_in_addition_to_its_results() -> None:
    attention = plan_of(torch.ops.aten._scaled_dot_product_flash_attention.default)
    query = torch.empty(1, 2, 1024, 8, device="meta")
    assert temporary_memory(attention, (query, query, query), {}) == 0
    scores = 2 * 1024 * 1024 * 4
    assert temporary_memory(attention, (query, query, query, 0.1), {}) >= 4 * scores
    nonzero = plan_of(torch.ops.aten.nonzero.default)
    assert temporary_memory(nonzero, (torch.empty(10, 20, device="meta"),), {}) == 10 * 20 * 2 * 8


@pytest.mark.parametrize("tracing", ["fake", "symbolic"])
def test_a_compiled_region_is_counted_from_its_graph(tracing: str) -> None:
    graph = make_fx(lambda x, w: torch.relu(x @ w).sum(), tracing_mode=tracing)(
        torch.ones(8, 4), torch.ones(4, 16)
    )
    cost = RegionCost(graph)
    for rows in (8,) if tracing == "fake" else (8, 1000):
        operations, nbytes = cost([torch.empty(rows, 4), torch.empty(4, 16)])
        product = rows * 16
        assert operations == 2 * product * 4 + 10 * product + 10
        assert nbytes == 2 * product * 4  # of the product and its relu


def test_a_region_beyond_the_bounds_ends_the_computing_of_everything() -> None:
    with gpuprobe.virtual_gpu("t4", compute="auto"):
        torch.zeros(1, device="cuda")
        values = session.active()._values  # type: ignore[union-attr]
        assert values is not None
        assert values.computing.allows(1e9, 100 * MIB)
        assert values.everything
        assert not values.computing.allows(1e9, 300 * MIB)
        assert not values.everything
        assert "later only whole numbers" in values.notes[0]


def test_programs_of_a_triton_kernel_are_counted_before_they_are_interpreted() -> None:
    with gpuprobe.virtual_gpu("t4", compute="auto"):
        from triton_kernels import add

        x = torch.ones(1 << 24, device="cuda")
        out = torch.empty_like(x)
        few = x[:2048]
        add[(2,)](few, few, out, 2048, BLOCK=1024)
        assert out[:2048].sum().item() == 4096
        add[lambda given: (x.numel() // given["BLOCK"],)](x, x, out, x.numel(), BLOCK=1024)
        values = session.active()._values  # type: ignore[union-attr]
        assert values is not None
        assert not values.everything
        assert not values.computing.knowledge.known(out)


def test_a_triton_kernel_costs_what_its_source_computes() -> None:
    from gpuprobe.native.values.compiled import _of_a_program

    one = _of_a_program("def copy(x, y):\n    store(y, load(x))\n")
    assert (
        _of_a_program("def twice(x, y):\n    store(y, load(x))\n    store(y, load(x))\n") == 2 * one
    )
    looped = "def loop(x, y, n):\n    for i in n:\n        store(y, load(x))\n"
    assert _of_a_program(looped) > 2 * one


@pytest.mark.parametrize(
    ("most", "where"), [(100, "test_value_budget.py"), (9000, "the backward pass")]
)
def test_where_all_values_were_no_longer_computed(
    most: float, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A product of 2 * 8 * 16 * 16 operations, whose backward pass has twice as many."""
    monkeypatch.setattr(shapes, "AT_ONCE_OPERATIONS", most)
    with gpuprobe.virtual_gpu("t4", compute="auto"):
        weight = torch.zeros(16, 16, device="cuda", requires_grad=True)
        x = torch.zeros(8, 16, device="cuda", requires_grad=True)
        (x @ weight).sum().backward()
        ended = session.active()._values.computing.ended  # type: ignore[union-attr]
    assert where in ended.partition(", where")[0]
