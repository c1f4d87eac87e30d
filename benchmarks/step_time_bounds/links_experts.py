"""Narrow experts, one on each GPU: tokens travel to them and back over PCIe."""

import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed._functional_collectives import all_to_all_single_autograd

dist.init_process_group("nccl")
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
world, width, tokens = dist.get_world_size(), 4096, 8192
expert = nn.Sequential(nn.Linear(width, 256), nn.GELU(), nn.Linear(256, width))
expert = expert.to("cuda", torch.bfloat16)
optimizer = torch.optim.AdamW(expert.parameters(), fused=True)
splits = [tokens // world] * world
for _ in range(4):
    x = torch.randn(tokens, width, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    there = all_to_all_single_autograd(x, splits, splits, dist.group.WORLD)
    back = all_to_all_single_autograd(expert(there), splits, splits, dist.group.WORLD)
    back.float().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
