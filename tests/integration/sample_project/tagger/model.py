"""A small transformer that reads a text and names its subject."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from tagger.data import SUBJECTS, VOCABULARY


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.mix = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        mixed = self.mix(x).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = mixed.permute(2, 0, 3, 1, 4)
        scores = query @ key.transpose(-2, -1) / math.sqrt(width // self.heads)
        weights = scores.softmax(-1)
        read = (weights @ value).transpose(1, 2).reshape(batch, length, width)
        return self.out(read)


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.before_attention = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.before_rest = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.before_attention(x))
        hidden = F.gelu(self.up(self.before_rest(x)))
        return x + self.down(hidden)


class Tagger(nn.Module):
    def __init__(self, width: int = 128, depth: int = 3, heads: int = 4) -> None:
        super().__init__()
        self.width = width
        self.embed = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.name = nn.Linear(width, SUBJECTS)
        self._positions: dict[object, torch.Tensor] = {}

    def positions(self, length: int, device: torch.device) -> torch.Tensor:
        """Sines of the positions, kept for each length."""
        key = length
        if key not in self._positions:
            steps = torch.arange(length, device=device).unsqueeze(1)
            rates = torch.exp(torch.arange(0, self.width, 2, device=device) * (-9.2 / self.width))
            self._positions[key] = torch.cat([(steps * rates).sin(), (steps * rates).cos()], dim=1)
        return self._positions[key]

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) + self.positions(tokens.shape[1], tokens.device)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.name(x.mean(dim=1))
