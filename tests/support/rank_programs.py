"""Small distributed programs, one for each way to divide a model among ranks.

    torchrun --nproc-per-node 4 tests/support/rank_programs.py fsdp2 FOLDER

Each rank writes what torch's allocator counted for it to ``FOLDER/RANK.json``: what a pretended
rank counts is compared with that.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

WIDTH, LAYERS, BATCH, STEPS = 256, 4, 8, 3
COUNTED = (
    "allocation.all.allocated",
    "allocated_bytes.all.allocated",
    "allocated_bytes.all.peak",
    "reserved_bytes.all.peak",
)

Step = Callable[[], Any]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.down(torch.relu(self.up(hidden)))


def model() -> nn.Sequential:
    return nn.Sequential(*[Block() for _ in range(LAYERS)])


def training(net: nn.Module, optimizer: Any = None) -> Step:
    optimizer = optimizer or torch.optim.AdamW(net.parameters())

    def step() -> None:
        net(torch.randn(BATCH, WIDTH, device="cuda")).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def ddp() -> Step:
    return training(nn.parallel.DistributedDataParallel(model().cuda(), bucket_cap_mb=2))


def ddp_bf16_hook() -> Step:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

    net = nn.parallel.DistributedDataParallel(model().cuda(), bucket_cap_mb=2)
    net.register_comm_hook(None, bf16_compress_hook)
    return training(net)


def zero() -> Step:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    net = nn.parallel.DistributedDataParallel(model().cuda(), bucket_cap_mb=2)
    return training(net, ZeroRedundancyOptimizer(net.parameters(), torch.optim.AdamW))


def fsdp1() -> Step:
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    policy = ModuleWrapPolicy({Block})
    return training(FullyShardedDataParallel(model().cuda(), auto_wrap_policy=policy))


def fsdp2(mesh: Any = None) -> Step:
    from torch.distributed.fsdp import fully_shard

    net = model().cuda()
    for block in net:
        fully_shard(block, mesh=mesh)
    fully_shard(net, mesh=mesh)
    return training(net)


def hsdp() -> Step:
    from torch.distributed.device_mesh import init_device_mesh

    shape = (dist.get_world_size() // 2, 2)
    return fsdp2(init_device_mesh("cuda", shape, mesh_dim_names=("replicate", "shard")))


def tp() -> Step:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    net = model().cuda()
    mesh = init_device_mesh("cuda", (dist.get_world_size(),), mesh_dim_names=("tp",))
    for block in net:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return training(net)


def pp() -> Step:
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import Schedule1F1B

    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", torch.cuda.current_device())
    net = nn.Sequential(*list(model())[rank * LAYERS // world : (rank + 1) * LAYERS // world])
    net.to(device)
    stage = PipelineStage(net, rank, world, device)
    schedule = Schedule1F1B(stage, 2 * world, loss_fn=nn.functional.mse_loss)
    optimizer = torch.optim.AdamW(net.parameters())

    def step() -> None:
        batch = torch.randn(4 * world, WIDTH, device=device)
        if rank == 0:
            schedule.step(batch)
        elif rank == world - 1:
            schedule.step(target=batch)
        else:
            schedule.step()
        optimizer.step()
        optimizer.zero_grad()

    return step


def pp_interleaved(zero_bubble: bool = False) -> Step:
    """Two stages on each rank; those of a zero-bubble schedule form a V."""
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import (
        ScheduleInterleaved1F1B,
        ScheduleZBVZeroBubble,
    )

    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", torch.cuda.current_device())
    each = LAYERS // (2 * world) or 1
    numbers = (rank, 2 * world - 1 - rank if zero_bubble else rank + world)
    blocks = [Block() for _ in range(2 * world * each)]
    parts = [nn.Sequential(*blocks[n * each : (n + 1) * each]).to(device) for n in numbers]
    stages = [
        PipelineStage(part, number, 2 * world, device)
        for number, part in zip(numbers, parts, strict=True)
    ]
    kind = ScheduleZBVZeroBubble if zero_bubble else ScheduleInterleaved1F1B
    schedule = kind(stages, 2 * world, loss_fn=nn.functional.mse_loss)
    optimizer = torch.optim.AdamW([p for part in parts for p in part.parameters()])
    last = 2 * world - 1 in numbers

    def step() -> None:
        batch = torch.randn(4 * world, WIDTH, device=device)
        given = (batch,) if rank == 0 else ()
        schedule.step(*given, **({"target": batch} if last else {}))
        optimizer.step()
        optimizer.zero_grad()

    return step


def pp_zero_bubble() -> Step:
    return pp_interleaved(zero_bubble=True)


def fsdp2_offload() -> Step:
    """Parameters, gradients and the optimizer's state are in host memory."""
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

    net = model()
    for block in net:
        fully_shard(block, offload_policy=CPUOffloadPolicy())
    fully_shard(net, offload_policy=CPUOffloadPolicy())
    return training(net)


def ep() -> Step:
    """Tokens go to experts on other ranks, and back."""
    import torch.distributed.nn.functional as functional

    world = dist.get_world_size()
    gate, expert = nn.Linear(WIDTH, WIDTH).cuda(), Block().cuda()
    optimizer = torch.optim.AdamW([*gate.parameters(), *expert.parameters()])

    def step() -> None:
        tokens = gate(torch.randn(4 * world, WIDTH, device="cuda"))
        there = functional.all_to_all_single(torch.empty_like(tokens), tokens)
        back = functional.all_to_all_single(torch.empty_like(tokens), expert(there))
        back.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        batch, length, _ = hidden.shape
        q, k, v = (
            part.view(batch, length, 4, -1).transpose(1, 2)
            for part in self.qkv(hidden).chunk(3, -1)
        )
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return hidden + self.out(attended.transpose(1, 2).reshape(batch, length, WIDTH))


def cp() -> Step:
    """Each rank has a part of every sequence; keys and values go around, or are gathered."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel
    from torch.nn.attention import SDPBackend, sdpa_kernel

    world = dist.get_world_size()
    mesh = init_device_mesh("cuda", (world,), mesh_dim_names=("cp",))
    net = nn.Sequential(Attention(), Attention()).cuda().bfloat16()
    optimizer = torch.optim.AdamW(net.parameters())

    def step() -> None:
        batch = torch.randn(2, 64 * world, WIDTH, device="cuda", dtype=torch.bfloat16)
        parallel = context_parallel(
            mesh, buffers=[batch], buffer_seq_dims=[1], no_restore_buffers={batch}
        )
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION), parallel:
            net(batch).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


PROGRAMS: dict[str, Callable[[], Step]] = {
    "ddp": ddp,
    "ddp_bf16_hook": ddp_bf16_hook,
    "zero": zero,
    "fsdp1": fsdp1,
    "fsdp2": fsdp2,
    "hsdp": hsdp,
    "tp": tp,
    "pp": pp,
    "pp_interleaved": pp_interleaved,
    "pp_zero_bubble": pp_zero_bubble,
    "fsdp2_offload": fsdp2_offload,
    "ep": ep,
    "cp": cp,
}


def counted() -> dict[str, int]:
    found = torch.cuda.memory_stats()
    return {name: int(found[name]) for name in COUNTED}


def main() -> None:
    name, folder = sys.argv[1:]
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    torch.manual_seed(0)
    dist.init_process_group("nccl")
    step = PROGRAMS[name]()
    for _ in range(STEPS):
        step()
    (Path(folder) / f"{dist.get_rank()}.json").write_text(json.dumps(counted()))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
