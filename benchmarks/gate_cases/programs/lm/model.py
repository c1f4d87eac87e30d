"""A small decoder-only transformer."""

import torch
import torch.nn.functional as F
from torch import nn

from config import Config


class Norm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        scale = x.pow(2).mean(-1, keepdim=True).add(1e-6).rsqrt()
        return x * scale * self.weight


class Attention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.heads = config.heads
        self.mix = nn.Linear(config.width, 3 * config.width, bias=False)
        self.out = nn.Linear(config.width, config.width, bias=False)

    def forward(self, x, mask):
        batch, length, width = x.shape
        mixed = self.mix(x).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = mixed.permute(2, 0, 3, 1, 4)
        read = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        return self.out(read.transpose(1, 2).reshape(batch, length, width))


class Feed(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.up = nn.Linear(config.width, 4 * config.width, bias=False)
        self.down = nn.Linear(4 * config.width, config.width, bias=False)

    def forward(self, x):
        hidden = F.gelu(self.up(x))
        return self.down(hidden)


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.first = Norm(config.width)
        self.attention = Attention(config)
        self.second = Norm(config.width)
        self.feed = Feed(config)

    def forward(self, x, mask):
        x = x + self.attention(self.first(x), mask)
        x = x + self.feed(self.second(x))
        return x


class Model(nn.Module):
    def __init__(self, config: Config):
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocabulary, config.width)
        self.place = nn.Embedding(config.positions, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.depth))
        self.norm = Norm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        self.head.weight = self.embed.weight

    def causal(self, tokens):
        length = tokens.shape[1]
        allowed = torch.ones(length, length, dtype=torch.bool, device=tokens.device)
        return allowed.tril()

    def forward(self, tokens):
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.embed(tokens) + self.place(places)
        mask = self.causal(tokens)
        for block in self.blocks:
            x = block(x, mask)
        x = self.norm(x)
        logits = self.head(x)
        return logits
