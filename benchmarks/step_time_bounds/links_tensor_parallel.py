"""Layers split by columns and rows over two consumer GPUs: two sums of activations each."""

import os

import torch
import torch.distributed as dist
import torch.nn as nn


class Sum(torch.autograd.Function):
    """Sums in the forward pass; its gradient passes through."""

    @staticmethod
    def forward(ctx, x):
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad


class Copy(torch.autograd.Function):
    """Passes through; sums its gradient."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous()
        dist.all_reduce(grad)
        return grad


dist.init_process_group("nccl")
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
width, share = 2048, 2048 // dist.get_world_size()
ups = nn.ModuleList(nn.Linear(width, share, bias=False) for _ in range(4))
downs = nn.ModuleList(nn.Linear(share, width, bias=False) for _ in range(4))
ups, downs = ups.to("cuda", torch.bfloat16), downs.to("cuda", torch.bfloat16)
optimizer = torch.optim.AdamW([*ups.parameters(), *downs.parameters()], fused=True)
for _ in range(4):
    x = torch.randn(4096, width, device="cuda", dtype=torch.bfloat16)
    for up, down in zip(ups, downs, strict=True):
        x = x + Sum.apply(down(torch.relu(up(Copy.apply(x)))))
    x.float().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
