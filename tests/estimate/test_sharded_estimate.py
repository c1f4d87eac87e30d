"""Sharded training without a cluster: one rank of several, with nobody to talk to."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn

import gpuprobe
from gpuprobe.errors import ProgramFailed

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.simulated]
BLOCK = 4 * (512 * 2048 * 2 + 2048 + 512)  # bytes of one block's parameters


def build() -> Callable[[], None]:
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("nccl")
    blocks = [
        nn.Sequential(nn.Linear(512, 2048), nn.ReLU(), nn.Linear(2048, 512)) for _ in range(8)
    ]
    model = nn.Sequential(*blocks).cuda()
    for block in model:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        optimizer.zero_grad()
        model(torch.randn(4, 512, device="cuda")).pow(2).mean().backward()
        optimizer.step()

    return step


@pytest.mark.parametrize("compute", ["shapes", "real"])
def test_fully_sharded(compute: str) -> None:
    found = gpuprobe.estimate(build, gpu="t4", ranks=8, compute=compute)
    assert found.ranks == 8
    shard = 8 * BLOCK // 8
    # Parameters, gradients and two moments of an eighth; and whole blocks while they compute.
    assert 4 * shard < found.peak_allocated - 16 * 2**20 < 4 * shard + 8 * BLOCK
    moments = next(row.bytes for row in found.by_category if row.name == "optimizer_state")
    assert 2 * shard <= moments <= 2 * shard * 1.05


def layers(ranks: int) -> Callable[[], Callable[[], None]]:
    """Training of four layers, sharded over so many ranks; 0: not sharded."""

    def prepare() -> Callable[[], None]:
        from torch.distributed.fsdp import fully_shard

        model = nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(4)]).cuda()
        if ranks:
            alone = {"rank": 0, "world_size": 1, "store": dist.HashStore()}
            dist.init_process_group("nccl", **(alone if ranks == 1 else {}))
            for layer in model:
                fully_shard(layer)
            fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters())

        def step() -> None:
            optimizer.zero_grad()
            model(torch.randn(4, 1024, device="cuda")).pow(2).mean().backward()
            optimizer.step()

        return step

    return prepare


def test_sharded_state_is_the_closed_form(monkeypatch: pytest.MonkeyPatch) -> None:
    """What each rank keeps is an N-th to the byte; one rank allocates as an unsharded run does:
    in the optimizer, where its peak is with small workspaces in the backward pass.
    """
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    parameters = 4 * 4 * (1024 * 1024 + 1024)
    found = {}
    for ranks in (0, 1, 2, 8):
        one = gpuprobe.estimate(layers(ranks), gpu="t4", ranks=max(1, ranks))
        if ranks == 1:
            dist.destroy_process_group()
        rows = {row.name: row.bytes for row in one.by_category}
        share = parameters // max(1, ranks)
        assert (rows["parameter"], rows["optimizer_state"]) == (share, 2 * share)
        found[ranks] = (rows, one.peak_allocated)
    assert found[1] == found[0]


def test_a_mesh_may_be_named_as_an_argument() -> None:
    from torch.distributed.device_mesh import DeviceMesh

    def step() -> None:
        dist.init_process_group("nccl")
        assert DeviceMesh("cuda", mesh=torch.arange(4)).size() == 4
        torch.ones(1, device="cuda")

    gpuprobe.estimate(step, gpu="t4", ranks=4, steps=1)


@pytest.mark.parametrize("fails", [False, True])
def test_a_pretended_job_ends_with_its_estimate(fails: bool) -> None:
    """Whether or not the program ends it: the next one may be another rank of another job."""

    def step() -> None:
        dist.init_process_group("nccl")
        torch.ones(1, device="cuda")
        if fails:
            raise ValueError("of the program")

    for rank in (1, 3):
        with contextlib.suppress(ProgramFailed, ValueError):
            gpuprobe.estimate(step, gpu="t4", ranks=4, rank=rank, steps=1)
        assert not dist.is_initialized()


def test_a_job_of_the_callers_own_goes_on() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    gpuprobe.estimate(lambda: torch.ones(1, device="cuda"), gpu="t4", ranks=4, steps=1)
    assert dist.get_world_size() == 1


def test_a_second_attempt_with_values_begins_the_job_again() -> None:
    def step() -> None:
        dist.init_process_group("nccl")
        if torch.ones(1024, 1024, device="cuda").exp().sum() > 0:
            torch.ones(1 << 22, device="cuda")

    found = gpuprobe.estimate(step, gpu="t4", ranks=4, steps=1)
    assert (found.compute, found.peak_allocated >> 20) == ("real", 16)
