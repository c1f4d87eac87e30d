"""Two ranks on gloo. Run as ``python distributed_programs.py FOLDER``: starts both, and leaves
in the folder what each rank recorded of each program and the losses it got with and without.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from programs import Net, batches, no_hooks_left
from torch import nn

import gpuprobe

WORLD = 2


def _train(net: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    losses = []
    for x in batches():
        optimizer.zero_grad()
        loss = net(x * (1 + dist.get_rank())).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def data_parallel() -> list[float]:
    torch.manual_seed(3)
    net = nn.parallel.DistributedDataParallel(Net())
    return _train(net, torch.optim.AdamW(net.parameters()))


def bucket_views() -> list[float]:
    torch.manual_seed(3)
    net = nn.parallel.DistributedDataParallel(Net(), gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    losses = []
    for x in batches():
        optimizer.zero_grad()
        with net.no_sync():
            net(x).square().mean().backward()
        loss = net(x * (1 + dist.get_rank())).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def fully_sharded() -> list[float]:
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(3)
    net = Net()
    mesh = dist.init_device_mesh("cpu", (WORLD,))
    fully_shard(net.body, mesh=mesh)
    fully_shard(net, mesh=mesh)
    return _train(net, torch.optim.AdamW(net.parameters()))


def by_hand() -> list[float]:
    """Gradients averaged by the program itself; waits for one of them later."""
    torch.manual_seed(3)
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    losses = []
    for x in batches():
        optimizer.zero_grad()
        loss = net(x * (1 + dist.get_rank())).square().mean()
        loss.backward()
        pending = [dist.all_reduce(p.grad, async_op=True) for p in net.parameters()]
        for work in pending:
            work.wait()
        optimizer.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        dist.barrier()
        losses.append(total.item())
    return losses


PROGRAMS: dict[str, Callable[[], list[float]]] = {
    made.__name__: made for made in (data_parallel, bucket_views, fully_sharded, by_hand)
}
if not hasattr(torch.cpu.Stream, "record_event"):
    del PROGRAMS["fully_sharded"]  # FSDP2 of torch 2.6 needs a GPU


def _rank(rank: int, folder: str, store: str) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(WORLD))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD)
    losses: dict[str, dict[str, list[float]]] = {}
    for name, program in PROGRAMS.items():
        losses[name] = {"": program()}
        for level in ("counters", "trace"):
            recording = Path(folder) / f"{name}-{level}.gpuprobe"
            gc.collect()  # else the models of the run before are the program's, too
            with no_hooks_left(), gpuprobe.record(recording, level=level):
                losses[name][level] = program()
    (Path(folder) / f"losses-{rank}.json").write_text(json.dumps(losses))
    dist.destroy_process_group()


def main(folder: str) -> None:
    with tempfile.TemporaryDirectory() as store:
        torch.multiprocessing.start_processes(
            _rank, (folder, f"{store}/store"), nprocs=WORLD, start_method="fork"
        )


if __name__ == "__main__":
    main(sys.argv[1])
