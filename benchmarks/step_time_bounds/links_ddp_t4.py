"""Data parallel over PCIe, with 8 samples for each GPU."""

import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("nccl")
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
layers = []
for _ in range(6):
    layers += [nn.Linear(2048, 2048), nn.ReLU()]
model = DistributedDataParallel(nn.Sequential(*layers).cuda())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x = torch.randn(8, 2048, device="cuda")
for _ in range(4):
    loss = model(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
dist.destroy_process_group()
