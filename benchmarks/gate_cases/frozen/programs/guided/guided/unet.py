"""The network that predicts the noise."""

import torch
import torch.nn as nn
import torch.nn.functional as F

from guided.nn import checkpoint, normalization, timestep_embedding


class ResBlock(nn.Module):
    def __init__(self, channels, emb_channels, out_channels, use_checkpoint=False):
        super().__init__()
        self.use_checkpoint = use_checkpoint
        self.in_layers = nn.Sequential(
            normalization(channels), nn.SiLU(), nn.Conv2d(channels, out_channels, 3, padding=1)
        )
        self.emb_layers = nn.Sequential(nn.SiLU(), nn.Linear(emb_channels, out_channels))
        self.out_layers = nn.Sequential(
            normalization(out_channels),
            nn.SiLU(),
            nn.Conv2d(out_channels, out_channels, 3, padding=1),
        )
        same = channels == out_channels
        self.skip = nn.Identity() if same else nn.Conv2d(channels, out_channels, 1)

    def forward(self, x, emb):
        return checkpoint(self._forward, (x, emb), self.use_checkpoint)

    def _forward(self, x, emb):
        h = self.in_layers(x)
        h = h + self.emb_layers(emb)[:, :, None, None]
        return self.skip(x) + self.out_layers(h)


class AttentionBlock(nn.Module):
    def __init__(self, channels, num_heads, use_checkpoint=True):
        super().__init__()
        self.num_heads = num_heads
        self.use_checkpoint = use_checkpoint
        self.norm = normalization(channels)
        self.qkv = nn.Conv1d(channels, 3 * channels, 1)
        self.proj_out = nn.Conv1d(channels, channels, 1)

    def forward(self, x):
        return checkpoint(self._forward, (x,), self.use_checkpoint)

    def _forward(self, x):
        b, c, *spatial = x.shape
        x = x.reshape(b, c, -1)
        qkv = self.qkv(self.norm(x))
        q, k, v = qkv.reshape(b * self.num_heads, -1, qkv.shape[-1]).chunk(3, dim=1)
        scale = q.shape[1] ** -0.5
        weight = torch.einsum("bct,bcs->bts", q * scale, k)
        weight = torch.softmax(weight, dim=-1)
        h = torch.einsum("bts,bcs->bct", weight, v).reshape(b, c, -1)
        return (x + self.proj_out(h)).reshape(b, c, *spatial)


class UNetModel(nn.Module):
    def __init__(self, args):
        super().__init__()
        width = args.num_channels
        emb = 4 * width
        self.model_channels = width
        self.time_embed = nn.Sequential(nn.Linear(width, emb), nn.SiLU(), nn.Linear(emb, emb))
        self.input = nn.Conv2d(3, width, 3, padding=1)
        self.down, self.up = nn.ModuleList(), nn.ModuleList()
        size, last, kept = args.image_size, width, [width]
        for mult in args.channel_mult:
            for _ in range(args.num_res_blocks):
                layers = [ResBlock(last, emb, mult * width, args.use_checkpoint)]
                last = mult * width
                if size in args.attention_resolutions:
                    layers.append(AttentionBlock(last, args.num_heads))
                self.down.append(nn.ModuleList(layers))
                kept.append(last)
            size //= 2
        self.middle = ResBlock(last, emb, last, args.use_checkpoint)
        for mult in reversed(args.channel_mult):
            for _ in range(args.num_res_blocks):
                block = ResBlock(last + kept.pop(), emb, mult * width, args.use_checkpoint)
                self.up.append(block)
                last = mult * width
        self.out = nn.Sequential(normalization(last), nn.SiLU(), nn.Conv2d(last, 3, 3, padding=1))
        self.every = args.num_res_blocks

    def forward(self, x, timesteps):
        emb = self.time_embed(timestep_embedding(timesteps, self.model_channels))
        h = self.input(x)
        hs = []
        for number, layers in enumerate(self.down, 1):
            h = layers[0](h, emb)
            for attention in layers[1:]:
                h = attention(h)
            hs.append(h)
            if number % self.every == 0:
                h = F.avg_pool2d(h, 2)
        h = self.middle(h, emb)
        for number, block in enumerate(self.up):
            if number % self.every == 0:
                h = F.interpolate(h, scale_factor=2, mode="nearest")
            h = block(torch.cat([h, hs.pop()], dim=1), emb)
        return self.out(h)
