"""Which ranks of a job behave alike: what one rank finds, and the classes that follow from it."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from gpuprobe.catalogue.gpus import parse_spec
from gpuprobe.cli.options import rank_list
from gpuprobe.errors import UsageError
from gpuprobe.model.plans.estimate import FITS, Estimate
from gpuprobe.model.plans.request import EstimateRequest
from gpuprobe.model.text import ranges
from gpuprobe.model.values import Bytes
from gpuprobe.native.session import EngineOptions, NativeSession
from gpuprobe.planning.peers import Job
from gpuprobe.planning.ranks import RankClasses, separated
from gpuprobe.torch_support.traffic import Traffic

pytestmark = pytest.mark.filterwarnings("ignore")


def report(**parts: Any) -> dict[str, Any]:
    return {"groups": [], "stages": [], "shards": [], **parts}


STAGES = [[0, 4], [1, 5], [2, 6], [3, 7]]
SHARDS = [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_a_job_without_differences_is_one_class() -> None:
    classes = RankClasses(512)
    classes.report(0, report(groups=SHARDS))
    assert classes.all() == [list(range(512))]


def test_the_stages_of_every_pipeline_are_told_apart() -> None:
    classes = RankClasses(8)
    classes.report(0, report(groups=[*STAGES, *SHARDS], stages=[[0, 4]]))
    assert classes.all() == SHARDS


def test_a_report_of_shards_is_about_the_stage_that_made_it() -> None:
    classes = RankClasses(8)
    groups = [*STAGES, *SHARDS]
    classes.report(0, report(groups=groups, stages=[[0, 4]]))
    classes.report(4, report(groups=groups, stages=[[0, 4]], shards=[[SHARDS[1], [0, 0, 1, 2]]]))
    assert classes.all() == [[0, 1, 2, 3], [4, 5], [6], [7]]


def test_a_pipeline_over_the_whole_job_has_a_stage_for_each_rank() -> None:
    classes = RankClasses(3)
    classes.report(0, report(stages=[[0, 1, 2]]))
    assert classes.all() == [[0], [1], [2]]


def test_ranks_without_such_a_group_are_a_class_of_theirs() -> None:
    classes = RankClasses(4)
    classes.report(0, report(groups=[[0, 1]], stages=[[0, 1]]))
    assert classes.all() == [[0], [1], [2, 3]]


@pytest.mark.parametrize(
    ("ranks", "text"), [([], ""), ([3], "3"), ([0, 1, 2, 8, 10, 11], "0-2,8,10-11")]
)
def test_ranges(ranks: list[int], text: str) -> None:
    assert ranges(ranks, ",") == text
    assert rank_list(text or "0") == (ranks or [0])


@pytest.mark.parametrize("text", ["", "1-", "-1", "3-1", "a", "0,,1"])
def test_lists_of_ranks_that_are_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="expected ranks from 0"):
        rank_list(text)


@pytest.fixture
def rank_2_of_4() -> Iterator[Traffic]:
    session = NativeSession(EngineOptions(compute="shapes"), parse_spec("h100-80gb"), Job(2, 4))
    session.traffic = Traffic(lambda: 0)
    session.start()
    try:
        yield session.traffic
    finally:
        session.stop()


def stepped(optimizer: torch.optim.Optimizer) -> None:
    for part in optimizer.param_groups:
        for tensor in part["params"]:
            tensor.grad = torch.zeros_like(tensor)
    optimizer.step()


@pytest.mark.simulated
def test_shards_that_are_not_equally_large(rank_2_of_4: Traffic) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cuda", (2, 2), mesh_dim_names=("dp", "tp"))

    def parameter(rows: int, *placements: Any) -> nn.Parameter:
        found = nn.Parameter(distribute_tensor(torch.zeros(rows, 8), mesh, placements))
        assert isinstance(found.data, DTensor)
        return found

    even = [parameter(8, Shard(0), Replicate()), parameter(8, Shard(0), Shard(0))]
    stepped(torch.optim.SGD(even, lr=0.1))
    assert rank_2_of_4.differences.document()["shards"] == []
    stepped(torch.optim.SGD([*even, parameter(7, Replicate(), Shard(0))], lr=0.1))
    found = rank_2_of_4.differences.document()
    assert found["shards"] == [[[2, 3], [0, 1]]]
    assert sorted(found["groups"]) == [[0, 1], [0, 2], [1, 3], [2, 3]]
    classes = RankClasses(4)
    classes.report(2, found)
    assert classes.all() == [[0, 2], [1, 3]]


@pytest.mark.simulated
def test_a_rank_outside_a_mesh_has_no_group_of_it(rank_2_of_4: Traffic) -> None:
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

    init_device_mesh("cuda", (4,))
    mesh = DeviceMesh("cuda", [[0, 1]], mesh_dim_names=("dp", "tp"))
    assert mesh.get_coordinate() is None
    assert [0, 1] in rank_2_of_4.differences.document()["groups"]


@pytest.mark.simulated
def test_whole_tensors_that_are_dealt_out(rank_2_of_4: Traffic) -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    dist.init_process_group("nccl")
    net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4)).cuda()
    stepped(ZeroRedundancyOptimizer(net.parameters(), torch.optim.AdamW))
    assert rank_2_of_4.differences.document()["shards"] == [[[0, 1, 2, 3], [0, 1, 2, 3]]]


@pytest.mark.simulated
def test_who_sends_to_one_rank_is_a_stage(rank_2_of_4: Traffic) -> None:
    dist.init_process_group("nccl")
    group = dist.new_group([0, 2])
    tensor = torch.ones(4, device="cuda")
    dist.all_reduce(tensor)
    assert rank_2_of_4.differences.document()["stages"] == []
    dist.send(tensor, dst=0, group=group)
    assert rank_2_of_4.differences.document()["stages"] == [[0, 2]]


def estimate(rank: int, peak: int) -> Estimate:
    size = Bytes(peak)
    return dataclasses.replace(
        Estimate(
            "t4", 1, 3, size, size, size, size, size, size, size, FITS, size, (), (), (), (), ()
        ),
        rank=rank,
    )


def test_ranks_that_are_alike_have_one_row() -> None:
    found = separated({0: estimate(0, 7), 3: estimate(3, 7)}, RankClasses(4))
    assert [(row.rank, row.alike) for row in found.by_rank] == [(0, "0-3")]
    assert "need the same memory" in found.assumed[-1]


def test_ranks_that_only_seem_alike_are_named() -> None:
    found = separated({0: estimate(0, 7), 3: estimate(3, 9)}, RankClasses(4))
    assert found.rank == 3
    assert [(row.rank, row.alike) for row in found.by_rank] == [(0, ""), (3, "")]
    assert "ranks 0 and 3 hold equal shards" in found.assumed[-1]
    assert "what ranks 0-3 need is unknown" in found.assumed[-1]


def test_of_two_unlike_ranks_nothing_is_unknown() -> None:
    found = separated({0: estimate(0, 7), 1: estimate(1, 9)}, RankClasses(2))
    assert found.assumed[-1].endswith("but need different memory: both were estimated")


def test_another_word_for_ranks() -> None:
    with pytest.raises(UsageError, match="unknown ranks 'all'"):
        EstimateRequest(ranks=4, rank="all").check()
