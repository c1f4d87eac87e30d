"""The model of how long communication takes: published times, and the network between nodes."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.distributed as dist
from torch import nn

import gpuprobe
from gpuprobe.errors import UsageError
from gpuprobe.model.plans.step_time import StepTime
from gpuprobe.model.values import Unavailable
from gpuprobe.step_time.links import HIGH, LOW, Links, network_rate, seconds

pytestmark = pytest.mark.filterwarnings("ignore")
ROOT = Path(__file__).resolve().parents[2]
H100 = Links(480.0, 370.0, network_rate("ndr"))
GB = 10**9


@pytest.fixture(scope="module")
def benchmark() -> ModuleType:
    spec = importlib.util.spec_from_file_location("link_model", ROOT / "benchmarks/link_model.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_published_times_of_all_reduce(benchmark: ModuleType) -> None:
    runs = json.loads(benchmark.DATA.read_text())["runs"]
    for purpose, least in (("fit", 50), ("check", 60)):
        found = [r for run in runs if run["for"] == purpose for r in benchmark.ratios(run)]
        assert len(found) >= least
        assert benchmark.error(found) <= benchmark.LIMIT
        assert sum(LOW <= 1 / ratio <= HIGH for ratio in found) >= 0.9 * len(found)
    assert benchmark.error([2.0, 0.5]) == pytest.approx(1.0)


def test_large_operations_reach_the_bandwidth() -> None:
    def rate(op: str, ranks: int, nodes: int, together: int) -> float:
        payload = 10_000 * GB
        return payload / seconds(op, payload, ranks, nodes, together, H100) / GB

    assert rate("all_reduce", 8, 1, 8) == pytest.approx(480 / (2 * 7 / 8), rel=1e-3)
    assert rate("all_gather", 8, 1, 8) == pytest.approx(370 / (7 / 8), rel=1e-3)
    assert rate("all_reduce", 64, 8, 8) == pytest.approx(360 / (2 * 63 / 64), rel=1e-3)
    assert rate("all_gather", 64, 8, 8) == pytest.approx(360 / (63 / 64), rel=1e-3)
    assert rate("all_reduce", 8, 8, 1) == pytest.approx(45 / (2 * 7 / 8), rel=1e-3)
    assert rate("all_to_all", 64, 8, 8) == pytest.approx(45 / (56 / 64), rel=1e-3)
    assert rate("send", 2, 2, 1) == pytest.approx(45, rel=1e-3)
    assert rate("recv", 2, 1, 2) == pytest.approx(370, rel=1e-3)
    assert seconds("all_reduce", 1 << 20, 1, 1, 1, H100) == 0


def test_a_larger_payload_never_takes_less() -> None:
    for nodes in (1, 2, 4, 8):
        took = [seconds("all_reduce", 1 << n, 8 * nodes, nodes, 8, H100) for n in range(34)]
        assert took == sorted(took)


def test_networks() -> None:
    assert (network_rate("hdr"), network_rate("20")) == (22.5, 20.0)
    for text in ("v9", "-1", "nan", "ib:ndr"):
        with pytest.raises(UsageError) as caught:
            network_rate(text)
        assert "ndr" in caught.value.hint


def build() -> Callable[[], None]:
    dist.init_process_group("nccl")
    net = nn.parallel.DistributedDataParallel(nn.Linear(256, 256).cuda())
    aside = torch.cuda.Stream()
    tensor = torch.ones(1 << 20, device="cuda")

    def step() -> None:
        net(torch.randn(8, 256, device="cuda")).sum().backward()  # asynchronous: its buckets
        with torch.cuda.stream(aside):
            dist.broadcast(tensor, 0)
        dist.all_reduce(tensor)

    return step


@pytest.mark.simulated
def test_the_time_of_a_step_has_communication_between_nodes() -> None:
    found = gpuprobe.estimate(build, ranks=16, per_node=8, network=45.0, steps=3)
    slower = gpuprobe.estimate(build, ranks=16, per_node=8, network=4.5, steps=3)
    assert isinstance(found.step_time, StepTime)
    assert isinstance(slower.step_time, StepTime)
    times = [
        next(row.ns for row in each.step_time.by_kind if row.name == "collective")
        for each in (found, slower)
    ]
    assert times[1] > times[0] > 0
    assert sum(row.count for row in found.communication) >= 3


@pytest.mark.simulated
def test_without_a_network_communication_between_nodes_has_no_time() -> None:
    found = gpuprobe.estimate(build, ranks=16, per_node=8, steps=3)
    assert isinstance(found.step_time, Unavailable) or any(
        "network is not given" in text for text in found.step_time.left_out
    )
