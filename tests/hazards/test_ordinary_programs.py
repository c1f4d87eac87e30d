"""Ordinary programs give no race, and what the ledger says of them."""

from __future__ import annotations

import pytest
import torch
from ordinary_workloads import WORKLOADS
from torch import nn

import gpuprobe
from gpuprobe.errors import UsageError

pytestmark = [pytest.mark.simulated, pytest.mark.filterwarnings("ignore")]


# What makes the host wait in them, and how often: what each says it does, and nothing else.
SYNCS = {
    "captured_training_step": {"item": 1},
    "compiled_model": {"item": 1},
    # gloo copies through the host
    "data_parallel_over_gloo": {"item": 1, "copy from pageable memory": 2},
}


@pytest.mark.parametrize("name", WORKLOADS)
def test_ordinary_training_is_silent(name: str) -> None:
    with gpuprobe.virtual_gpu("2xh100-80gb"), gpuprobe.detect_hazards() as found:
        WORKLOADS[name]()
    assert [finding.message for finding in found.races] == []
    assert found.self_waits == []
    assert found.redundant == []
    waits = {row.reason: row.count for row in found.syncs if not row.allowed}
    assert waits == SYNCS.get(name, {})
    assert found.operations > 10, found.coverage


def test_it_enters_a_virtual_gpu_by_itself() -> None:
    with gpuprobe.detect_hazards() as found:
        assert torch.cuda.is_available()
        value = torch.ones(10, device="cuda")
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            value.add_(1)
    (race,) = found.races
    assert race.kind == "write-after-write"
    assert race.rule == "GP203"
    assert race.fix is not None


def test_not_twice() -> None:
    with gpuprobe.detect_hazards():
        with pytest.raises(UsageError), gpuprobe.detect_hazards():
            pass
        assert torch.zeros(2, device="cuda").is_cuda


def test_findings_are_one_for_each_pair_of_places() -> None:
    with gpuprobe.detect_hazards() as found:
        side = torch.cuda.Stream()
        kept = []
        for _ in range(5):
            kept.append(torch.ones(10, device="cuda"))
            with torch.cuda.stream(side):
                kept[-1].sum()
    assert [finding.kind for finding in found.races] == ["read-after-write"]


def test_every_hidden_synchronisation_is_in_the_ledger() -> None:
    with gpuprobe.detect_hazards() as found:
        value = torch.ones(10, device="cuda")
        value.sum().item()
        if value.sum() > 0:
            pass
        value[value > 0]
        value[value > 5] = 0.0  # masked_fill: no wait
        torch.nonzero(value)
        torch.tensor([1.0], device="cuda")
        torch.ones(3).to("cuda", non_blocking=True)
        repeats = torch.ones(10, dtype=torch.int64, device="cuda")
        torch.repeat_interleave(value, repeats)
        torch.repeat_interleave(value, repeats, output_size=10)
        torch.cuda.empty_cache()
        value.cpu()
    reasons = sorted(row.reason for row in found.syncs if not row.allowed)
    assert reasons == [
        "copy from pageable memory",
        "empty_cache",
        "item",
        "item",
        "mask",
        "new tensor from host values",
        "nonzero",
        "repeat_interleave",
    ]
    kinds = {finding.kind for finding in found.findings}
    assert kinds == {"implicit-sync"}
    assert all(finding.fix is not None and finding.fix.text for finding in found.findings)


def test_intended_synchronisations_are_counted_but_not_reported() -> None:
    with gpuprobe.detect_hazards() as found:
        value = torch.ones(10, device="cuda")
        with gpuprobe.allow_sync("logging"):
            value.sum().item()
        value.max().item()  # gpuprobe: allow
    assert found.findings == []
    assert [row.count for row in found.syncs if row.reason == "item"] == [1, 1]


def test_declared_kernels_take_part() -> None:
    with gpuprobe.detect_hazards() as found:
        value = torch.ones(10, device="cuda")
        gpuprobe.declare_access(writes=value, stream=torch.cuda.Stream())
    (race,) = found.races
    assert "declared kernel" in race.message
    gpuprobe.declare_access(reads=[])  # outside: nothing to tell


def test_redundant_waits() -> None:
    with gpuprobe.detect_hazards() as found:
        side = torch.cuda.Stream()
        value = torch.ones(10, device="cuda")
        side.wait_stream(torch.cuda.current_stream())
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            value.sum()
    assert [count for _, count in found.redundant] == [1]


def test_a_wait_that_is_needed_once_is_not_redundant() -> None:
    with gpuprobe.detect_hazards() as found:
        side = torch.cuda.Stream()
        value = torch.ones(10, device="cuda")
        for at in range(3):
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                value[at].fill_(1)
    assert found.races == []
    assert found.redundant == []


def test_the_programs_own_sync_debug_mode_is_left_alone() -> None:
    with gpuprobe.virtual_gpu("h100-80gb"):
        torch.cuda.set_sync_debug_mode("warn")
        with gpuprobe.detect_hazards():
            nn.Linear(2, 2).cuda()
        assert torch.cuda.get_sync_debug_mode() == 1
