"""Parts of networks."""

import math

import torch
import torch.nn as nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint


class GroupNorm32(nn.GroupNorm):
    def forward(self, x):
        return super().forward(x.float()).type(x.dtype)


def normalization(channels):
    return GroupNorm32(8, channels)


def update_ema(target_params, source_params, rate=0.99):
    for targ, src in zip(target_params, source_params):
        targ.detach().mul_(rate).add_(src, alpha=1 - rate)


def timestep_embedding(timesteps, dim, max_period=10000):
    half = dim // 2
    freqs = torch.exp(-math.log(max_period) * torch.arange(half, device=timesteps.device) / half)
    args = timesteps[:, None].float() * freqs[None]
    return torch.cat([torch.cos(args), torch.sin(args)], dim=-1)


def checkpoint(func, inputs, flag):
    """Evaluate a function without caching intermediate activations, at the expense of extra
    compute in the backward pass."""
    if flag:
        return torch_checkpoint(func, *inputs, use_reentrant=False)
    return func(*inputs)
