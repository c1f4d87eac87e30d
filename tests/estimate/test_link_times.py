"""The model of how long communication takes: published times, shapes of groups, the estimate."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import gpuprobe
from gpuprobe.errors import UsageError
from gpuprobe.model.plans.links import HIGH, LOW, node_shape, parse_links, seconds
from gpuprobe.reporters.json.plans import ESTIMATE
from gpuprobe.reporters.sections.parts import Table
from gpuprobe.reporters.sections.plans import estimate_sections

pytestmark = pytest.mark.filterwarnings("ignore")
ROOT = Path(__file__).resolve().parents[2]
H100 = parse_links("nvlink:h100,ib:ndr")
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


def test_where_the_ranks_of_a_group_are() -> None:
    assert node_shape(range(16), 8) == (2, 8)
    assert node_shape([0, 8, 16, 24], 8) == (4, 1)
    assert node_shape([3, 4], 8) == (1, 2)
    assert node_shape([0, 1, 8], 8) == (2, 2)


def test_links_by_number() -> None:
    links = parse_links("nvlink:300, ib:20")
    assert (links.reduce, links.nvlink, links.network) == (300, 300, 20)
    assert parse_links("nvlink:h200").network == 0


@pytest.mark.parametrize(
    "text",
    ["", "ib:ndr", "nvlink", "nvlink:v9", "nvlink:-1", "nvlink:nan", "tcp:1", "nvlink:1,nvlink:2"],
)
def test_links_that_are_refused(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_links(text)
    assert "nvlink:h100" in caught.value.hint


@pytest.mark.simulated
def test_several_nodes_need_a_network() -> None:
    with pytest.raises(UsageError, match="no ib"):
        seconds("all_reduce", 1, 16, 2, 8, parse_links("nvlink:h100"))
    with pytest.raises(UsageError, match="16 ranks are on several nodes of 8") as caught:
        gpuprobe.estimate(lambda: None, ranks=16, per_node=8, link="nvlink:h100")
    assert "--per-node 16" in caught.value.hint


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
def test_exposed_operations_and_those_that_can_be_hidden() -> None:
    found = gpuprobe.estimate(build, ranks=16, per_node=8, link="nvlink:h100,ib:ndr", steps=3)
    rows = {(row.op, row.overlaps): row for row in found.communication_time}
    assert set(rows) == {("all_reduce", True), ("broadcast", True), ("all_reduce", False)}
    exposed = rows["all_reduce", False]
    middle = seconds("all_reduce", 4 << 20, 16, 2, 8, H100) * 1e9
    assert (exposed.nodes, exposed.count) == (2, 1)
    assert (exposed.low_ns, exposed.high_ns) == (round(middle * LOW), round(middle * HIGH))
    assert sum(row.count for row in found.communication_time) == sum(
        row.count for row in found.communication
    )
    (section,) = [s for s in estimate_sections(found) if s.title.startswith("Time of comm")]
    assert "a model, not measured (nvlink:h100,ib:ndr, 8 ranks on each node)" in section.title
    table: Any = section.parts[0]
    assert isinstance(table, Table)
    assert [row.cells[3] for row in table.foot] == ["1", "2"]
    assert ESTIMATE.read(json.loads(json.dumps(ESTIMATE.plain(found)))) == found


@pytest.mark.simulated
def test_without_links_there_are_no_times() -> None:
    found = gpuprobe.estimate(build, ranks=4, steps=1)
    assert (found.link, found.per_node, found.communication_time) == ("", 0, ())
