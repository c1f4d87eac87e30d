"""The network that predicts the noise in an image."""

import math

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint


def embed_time(t, width):
    half = width // 2
    rates = torch.exp(-math.log(10000) * torch.arange(half, device=t.device) / half)
    angles = t[:, None].float() * rates[None]
    return torch.cat([angles.sin(), angles.cos()], dim=-1)


class ResidualBlock(nn.Module):
    def __init__(self, ins, outs, time_width):
        super().__init__()
        self.norm_in = nn.GroupNorm(8, ins)
        self.conv_in = nn.Conv2d(ins, outs, 3, padding=1)
        self.from_time = nn.Linear(time_width, outs)
        self.norm_out = nn.GroupNorm(8, outs)
        self.conv_out = nn.Conv2d(outs, outs, 3, padding=1)
        self.shortcut = nn.Conv2d(ins, outs, 1) if ins != outs else nn.Identity()

    def forward(self, x, time):
        h = self.conv_in(F.silu(self.norm_in(x)))
        h = h + self.from_time(F.silu(time))[:, :, None, None]
        h = self.conv_out(F.silu(self.norm_out(h)))
        return h + self.shortcut(x)


class SpatialAttention(nn.Module):
    def __init__(self, width, heads=4):
        super().__init__()
        self.heads = heads
        self.norm = nn.GroupNorm(8, width)
        self.qkv = nn.Conv2d(width, 3 * width, 1)
        self.project = nn.Conv2d(width, width, 1)

    def forward(self, x):
        n, c, height, width = x.shape
        qkv = self.qkv(self.norm(x)).view(n, 3, self.heads, c // self.heads, height * width)
        q, k, v = qkv.transpose(-1, -2).unbind(1)
        out = F.scaled_dot_product_attention(q, k, v)
        return x + self.project(out.transpose(-1, -2).reshape(n, c, height, width))


class UNet(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.time_width = 4 * cfg.width
        self.time = nn.Sequential(
            nn.Linear(cfg.width, self.time_width),
            nn.SiLU(),
            nn.Linear(self.time_width, self.time_width),
        )
        self.base = cfg.width
        self.stem = nn.Conv2d(3, cfg.width, 3, padding=1)
        widths = [cfg.width * m for m in cfg.multipliers]
        self.down = nn.ModuleList()
        self.up = nn.ModuleList()
        size, last = cfg.size, cfg.width
        for wide in widths:
            attend = SpatialAttention(wide) if size in cfg.attention_sizes else nn.Identity()
            self.down.append(nn.ModuleList([ResidualBlock(last, wide, self.time_width), attend]))
            last, size = wide, size // 2
        self.middle = ResidualBlock(last, last, self.time_width)
        for wide in reversed(widths):
            self.up.append(ResidualBlock(last + wide, wide, self.time_width))
            last = wide
        self.out = nn.Sequential(nn.GroupNorm(8, last), nn.SiLU(), nn.Conv2d(last, 3, 3, padding=1))

    def forward(self, x, t):
        time = self.time(embed_time(t, self.base))
        x = self.stem(x)
        skips = []
        for block, attend in self.down:
            x = attend(block(x, time))
            skips.append(x)
            x = F.avg_pool2d(x, 2)
        x = checkpoint(self.middle, x, time, use_reentrant=False)
        for block in self.up:
            x = F.interpolate(x, scale_factor=2, mode="nearest")
            x = checkpoint(block, torch.cat([x, skips.pop()], dim=1), time, use_reentrant=False)
        return self.out(x)
