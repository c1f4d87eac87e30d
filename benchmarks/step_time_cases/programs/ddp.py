"""Data parallel over two GPUs, with micro-batches that are reduced once."""

import contextlib
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel

WIDTH, DEPTH, BATCH, MICRO = 2048, 4, 64, 2


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x):
        for layer in self.layers:
            x = x + torch.relu(layer(self.norm(x)))
        return x


def main():
    dist.init_process_group("nccl")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    model = DistributedDataParallel(Net().cuda())
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for _ in range(4):
        for micro in range(MICRO):
            x = torch.randn(BATCH, WIDTH, device="cuda")
            last = micro == MICRO - 1
            with contextlib.nullcontext() if last else model.no_sync():
                loss = model(x).square().mean() / MICRO
                loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
