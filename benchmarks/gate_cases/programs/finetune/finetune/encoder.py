"""A transformer encoder with a head for classes."""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


class Layer(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.norm_1 = nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.norm_2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x):
        y = self.norm_1(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.down(torch.relu(self.up(self.norm_2(x))))


class Encoder(nn.Module):
    def __init__(self, words, width, heads, depth, classes):
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.layers = nn.ModuleList(Layer(width, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)
        self.checkpoints = {"enabled": False}

    def freeze(self, count):
        """Train only what is behind the first ``count`` layers."""
        for part in (self.embedding, *self.layers[:count]):
            part.requires_grad_(False)

    def gradient_checkpointing(self, enabled, use_reentrant):
        self.checkpoints = {"enabled": enabled, "use_reentrant": use_reentrant}

    def prepare(self, h):
        if self.checkpoints.get("use_reentrant"):
            h.requires_grad_()  # else the reentrant checkpoints have no gradients
        return h

    def forward(self, words):
        h = self.prepare(self.embedding(words))
        for layer in self.layers:
            if self.checkpoints["enabled"] and self.training:
                h = checkpoint(layer, h, use_reentrant=self.checkpoints["use_reentrant"])
            else:
                h = layer(h)
        return self.head(self.norm(h).mean(1))
