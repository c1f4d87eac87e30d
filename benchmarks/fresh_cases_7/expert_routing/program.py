"""A mixture of experts: each token goes through two of eight."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn


@dataclass(frozen=True)
class MoEConfig:
    width: int = 256
    experts: int = 8
    chosen: int = 2
    layers: int = 2
    vocabulary: int = 512


class Expert(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.w1 = nn.Linear(width, 4 * width)
        self.w2 = nn.Linear(4 * width, width)

    def forward(self, x):
        return self.w2(F.gelu(self.w1(x)))


class MoE(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.cfg = cfg
        self.gate = nn.Linear(cfg.width, cfg.experts)
        self.experts = nn.ModuleList(Expert(cfg.width) for _ in range(cfg.experts))

    def forward(self, x):
        weights, chosen = self.gate(x).topk(self.cfg.chosen, dim=-1)
        weights = weights.softmax(-1)
        result = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            rows, which = torch.where(chosen == i)
            result = result.index_add(0, rows, weights[rows, which, None] * expert(x[rows]))
        return result


class Model(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.embed = nn.Embedding(cfg.vocabulary, cfg.width)
        self.layers = nn.ModuleList(MoE(cfg) for _ in range(cfg.layers))
        self.norms = nn.ModuleList(nn.LayerNorm(cfg.width) for _ in range(cfg.layers))
        self.head = nn.Linear(cfg.width, cfg.vocabulary)

    def forward(self, tokens):
        x = self.embed(tokens).flatten(0, 1)
        for norm, layer in zip(self.norms, self.layers):
            x = x + layer(norm(x))
        return self.head(x)


def run(cfg, steps=4):
    model = Model(cfg).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(steps):
        tokens = torch.randint(0, cfg.vocabulary, (16, 65)).cuda()
        loss = F.cross_entropy(model(tokens[:, :-1]), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(step, loss.item())


if __name__ == "__main__":
    torch.manual_seed(0)
    run(MoEConfig())
