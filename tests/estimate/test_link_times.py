"""The model of how long communication between nodes takes: published times, and the estimate."""

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
from gpuprobe.model.plans.links import HIGH, LOW, Links, seconds
from gpuprobe.model.plans.step_time import StepTime
from gpuprobe.model.values import Unavailable

pytestmark = pytest.mark.filterwarnings("ignore")
ROOT = Path(__file__).resolve().parents[2]
H100 = Links(reduce=480, nvlink=370, network=45)
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
        assert benchmark.error(found) <= 0.10
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


def build() -> Callable[[], None]:
    dist.init_process_group("nccl")
    net = nn.parallel.DistributedDataParallel(nn.Linear(256, 256).cuda())
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    tensor = torch.ones(1 << 20, device="cuda")

    def step() -> None:
        net(torch.randn(8, 256, device="cuda")).sum().backward()
        dist.all_reduce(tensor)
        optimizer.step()

    return step


@pytest.mark.simulated
def test_a_step_over_several_nodes_is_predicted_with_their_network() -> None:
    def predicted(network: float) -> StepTime | Unavailable:
        found = gpuprobe.estimate(
            build, gpu="8xh100-80gb", ranks=16, network=network, per_node=8, steps=3
        )
        return found.step_time

    unknown, slow, fast = predicted(0), predicted(1.0), predicted(45.0)
    assert isinstance(unknown, Unavailable)
    assert "--network" in unknown.reason
    assert isinstance(slow, StepTime)
    assert isinstance(fast, StepTime)
    assert slow.low_ns > fast.high_ns
