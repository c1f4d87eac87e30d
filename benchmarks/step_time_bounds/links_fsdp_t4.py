"""Sharded parameters over PCIe: gathered for each layer, forward and backward."""

import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.fsdp import fully_shard

dist.init_process_group("nccl")
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
model = nn.Sequential(*[nn.Linear(3072, 3072, bias=False) for _ in range(6)]).cuda().half()
for layer in model:
    fully_shard(layer)
fully_shard(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x = torch.randn(32, 3072, device="cuda", dtype=torch.float16)
for _ in range(4):
    loss = model(x).float().square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
dist.destroy_process_group()
