"""What process groups over NCCL keep of what is sent, and the buffers that they make."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import gpuprobe
from gpuprobe.torch_support.version import installed

pytestmark = pytest.mark.filterwarnings("ignore")
MIB = 2**20
RANKS = 4
Measured = dict[str, float]
KEEPS = installed() >= (2, 8)
keeps = pytest.mark.skipif(not KEEPS, reason="torch before 2.8 keeps nothing")


def allocated() -> float:
    return torch.cuda.memory_allocated() / MIB


def measured(steps: Callable[[torch.Tensor, Measured], None], **options: Any) -> Measured:
    """MiB in addition to a tensor of 1 MiB and one for each rank, the same with and without
    values.
    """
    found: Measured = {}

    def run() -> None:
        dist.init_process_group("nccl")
        steps(torch.ones(MIB // 4, device="cuda"), found)

    both = []
    for compute in ("shapes", "real"):
        gpuprobe.estimate(run, "t4", ranks=RANKS, steps=1, compute=compute, **options)
        both.append(dict(found))
    assert both[0] == both[1]
    return found


def lists(mine: torch.Tensor, found: Measured) -> None:
    parts = [torch.empty_like(mine) for _ in range(RANKS)]
    for name, send in {
        "all_gather": lambda **how: dist.all_gather(parts, mine, **how),
        "reduce_scatter": lambda **how: dist.reduce_scatter(mine, parts, **how),
    }.items():
        before = allocated()
        torch.cuda.reset_peak_memory_stats()
        send()
        found[f"peak of {name}"] = torch.cuda.max_memory_allocated() / MIB - before
        found[f"after {name}"] = allocated() - before
        work = send(async_op=True)
        found[f"during {name}"] = allocated() - before
        work.wait()
        found[f"waited for {name}"] = allocated() - before
    uneven = [torch.empty(1 + (rank == 1), device="cuda") for rank in range(RANKS)]
    torch.cuda.reset_peak_memory_stats()
    before = allocated()
    dist.all_gather(uneven, torch.ones(1, device="cuda"))
    found["uneven"] = torch.cuda.max_memory_allocated() / MIB - before


def test_lists_are_sent_as_one_tensor() -> None:
    found = measured(lists)
    for name in ("all_gather", "reduce_scatter"):
        assert found[f"peak of {name}"] == RANKS
        assert found[f"during {name}"] == RANKS * KEEPS
        assert found[f"after {name}"] == found[f"waited for {name}"] == 0
    assert found["uneven"] == 1 / 2048  # the block of what this rank sends


def dropped(mine: torch.Tensor, found: Measured) -> None:
    before = allocated()
    dist.all_reduce(torch.ones_like(mine), async_op=True)
    dist.all_reduce(torch.ones_like(mine), async_op=True).get_future().wait()
    found["dropped"] = allocated() - before
    dist.all_reduce(mine)
    found["not done"] = allocated() - before
    torch.cuda.synchronize()
    found["done"] = allocated() - before
    dist.all_reduce(mine, group=dist.new_group(range(RANKS)))
    found["of another group"] = allocated() - before
    dist.all_reduce(mine)
    found["seen"] = allocated() - before


@keeps
def test_what_nobody_waits_for_is_kept() -> None:
    """Source: ProcessGroupNCCL.cpp, Watchdog::runLoop and workEnqueue."""
    kept = measured(dropped)
    assert kept == {"dropped": 2, "not done": 2, "done": 2, "of another group": 2, "seen": 0}
    assert set(measured(dropped, torch="2.7").values()) == {0}


@pytest.mark.parametrize("wait", ["item", "copy", "event", "stream", "many"])
def test_what_the_host_waits_for_is_done(wait: str) -> None:
    def steps(mine: torch.Tensor, found: Measured) -> None:
        before = allocated()
        dist.all_reduce(torch.ones_like(mine), async_op=True)
        if wait == "item":
            (mine[:2].sum() * 0).item()
        elif wait == "copy":
            mine[:2].cpu()
        elif wait == "event":
            torch.cuda.current_stream().record_event().synchronize()
        elif wait == "stream":
            torch.cuda.current_stream().synchronize()
        else:
            for _ in range(1024):
                torch.empty(1, device="cuda")
        dist.all_reduce(mine)
        found["kept"] = allocated() - before

    assert measured(steps) == {"kept": 0}


@keeps
def test_what_a_group_keeps_ends_with_it() -> None:
    def steps(mine: torch.Tensor, found: Measured) -> None:
        before = allocated()
        group = dist.new_group(range(RANKS))
        for one in (group, None):
            dist.all_reduce(torch.ones_like(mine), async_op=True, group=one)
        found["both"] = allocated() - before
        dist.destroy_process_group(group)
        found["one"] = allocated() - before
        dist.destroy_process_group()
        found["none"] = allocated() - before

    assert measured(steps) == {"both": 2, "one": 1, "none": 0}


@keeps
def test_groups_over_gloo_keep_nothing() -> None:
    def steps(mine: torch.Tensor, found: Measured) -> None:
        host = dist.new_group(range(RANKS), backend="gloo")
        nccl = dist.new_group(range(RANKS))
        for group, name in ((host, "gloo"), (nccl, "nccl")):
            before = allocated()
            dist.all_reduce(torch.ones_like(mine), async_op=True, group=group)
            found[name] = allocated() - before

    assert measured(steps) == {"gloo": 0, "nccl": 1}


def test_one_process_with_a_group_of_its_own(tmp_path: Path) -> None:
    with gpuprobe.virtual_gpu("t4"):
        dist.init_process_group("nccl", f"file://{tmp_path}/meeting", rank=0, world_size=1)
        work = dist.all_reduce(torch.ones(MIB // 4, device="cuda"), async_op=True)
        assert allocated() == 1
        assert work is not None
        work.wait()
        del work  # which has its results until then
        assert allocated() == 0


@keeps
def test_gradients_that_an_optimizer_has_sent_are_there_in_the_next_step() -> None:
    """As those of optimizers that wait for futures: two gradients at the peak of a backward pass,
    though each step has set them to None.
    """

    def steps(mine: torch.Tensor, found: Measured) -> None:
        weight = torch.ones(MIB, device="cuda", requires_grad=True)
        for _ in range(3):
            torch.cuda.reset_peak_memory_stats()
            weight.sum().backward()
            peak = torch.cuda.max_memory_allocated() / MIB
            future = dist.all_reduce(weight.grad, async_op=True).get_future()
            future.wait()
            weight.grad = None
            del future
            torch.cuda.synchronize()
        found["peak"] = peak - 1  # without `mine`

    def rounded(**options: Any) -> int:
        return round(measured(steps, **options)["peak"])

    assert (rounded(), rounded(torch="2.7")) == (12, 8)


@keeps
def test_what_distributed_data_parallel_broadcasts_is_waited_for() -> None:
    """By C++ code: as much is allocated as before torch 2.8."""

    def steps(mine: torch.Tensor, found: Measured) -> None:
        before = allocated()
        net = torch.nn.Linear(512, 512, bias=False).cuda()
        ddp = torch.nn.parallel.DistributedDataParallel(net)
        found["net and bucket"] = allocated() - before
        ddp(torch.ones(1, 512, device="cuda")).sum().backward()

    assert measured(steps) == measured(steps, torch="2.7") == {"net and bucket": 2}


@keeps
def test_the_estimate_says_what_keeps_them_and_what_lets_go() -> None:
    def run(wait: bool) -> str:
        def steps() -> None:
            dist.init_process_group("nccl")
            for _ in range(2):
                work = dist.all_reduce(torch.ones(MIB, device="cuda"), async_op=True)
                assert work is not None
                work.wait() if wait else work.get_future().wait()
                del work
                torch.cuda.synchronize()

        found = gpuprobe.estimate(steps, "t4", ranks=RANKS, steps=1)
        (line,) = [text for text in found.assumed if "collectives" in text] or [""]
        return line

    assert not run(wait=True)
    said = run(wait=False)
    assert said.startswith("4.0 MiB at most are kept by collectives")
    assert f"{Path(__file__).name}:" in said
    assert "Work.wait() lets go" in said
