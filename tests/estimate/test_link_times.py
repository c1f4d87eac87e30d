"""The model of how long communication between nodes takes: published times, and the estimate."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import gpuprobe
from gpuprobe.model.plans.links import HIGH, LOW, Links, seconds
from gpuprobe.model.plans.step_time import StepTime
from gpuprobe.model.values import Unavailable

pytestmark = pytest.mark.filterwarnings("ignore")
H100 = Links(reduce=480, nvlink=370, network=45)
"""Of an all-reduce that NVSwitch adds up, and other operations: issue 212 of
github.com/NVIDIA/nccl-tests; of 400 Gb/s InfiniBand: issue 290 has 46 to 48."""

GB = 10**9


def ratios(run: dict[str, Any]) -> list[float]:
    """Model divided by published, for each size. Published are the times out of place and in place:
    the shorter one counts, since the first operation of a size can include setting up its
    connections."""
    nodes = run["nodes"]
    return [
        seconds("all_reduce", int(size), 8 * nodes, nodes, 8, H100) / (min(times) * 1e-6)
        for size, times in run["microseconds"].items()
    ]


def geometric_mean_error(modelled: list[float]) -> float:
    return math.exp(sum(abs(math.log(ratio)) for ratio in modelled) / len(modelled)) - 1


@pytest.mark.parametrize(("purpose", "figures"), [("fit", 50), ("check", 60)])
def test_published_times_of_all_reduce(purpose: str, figures: int) -> None:
    """Of nccl-tests. The runs "fit" gave the model its constants, the runs "check" did not."""
    runs = json.loads((Path(__file__).parent / "nccl_tests_h100.json").read_text())["runs"]
    modelled = [ratio for run in runs if run["for"] == purpose for ratio in ratios(run)]
    assert len(modelled) >= figures
    assert geometric_mean_error(modelled) <= 0.10
    assert sum(LOW <= 1 / ratio <= HIGH for ratio in modelled) >= 0.9 * len(modelled)


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
    assert slow.low_ns > 3 * fast.low_ns
    assert slow.expected_ns > 3 * fast.expected_ns
