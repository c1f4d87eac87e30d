"""Bayesian optimisation with an ensemble surrogate that is fitted again in each round."""

from dataclasses import dataclass
from functools import cache

import torch
from torch import nn


@dataclass
class Settings:
    dim: int = 64
    width: int = 1280
    members: int = 2
    initial: int = 128
    batch: int = 32
    rounds: int = 5


class Surrogate(nn.Module):
    def __init__(self, settings):
        super().__init__()
        self.members = nn.ModuleList(
            nn.Sequential(
                nn.Linear(settings.dim, settings.width),
                nn.SiLU(),
                nn.Linear(settings.width, settings.width),
                nn.SiLU(),
                nn.Linear(settings.width, 1),
            )
            for _ in range(settings.members)
        )

    def forward(self, x):
        return torch.stack([member(x).squeeze(-1) for member in self.members])


@cache
def incumbent(model, points):
    with torch.no_grad():
        return model(points).mean(0).max()


def fit(model, x, y, steps=6):
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for _ in range(steps):
        optimizer.zero_grad()
        (model(x) - y).square().mean().backward()
        optimizer.step()
    optimizer.zero_grad()
    return model.eval()


def expected_improvement(model, x, observed):
    with torch.no_grad():
        samples = model(x)
    return (samples - incumbent(model, observed)).clamp(min=0).mean(0)


def objective(x):
    return -(x - 0.3).square().sum(1)


def optimize(settings):
    x = torch.rand(settings.initial, settings.dim, device="cuda")
    y = objective(x)
    for number in range(settings.rounds):
        model = fit(Surrogate(settings).cuda(), x, y)
        pool = torch.rand(512, settings.dim, device="cuda")
        scores = expected_improvement(model, pool, x)
        chosen = pool[scores.topk(settings.batch).indices]
        x, y = torch.cat([x, chosen]), torch.cat([y, objective(chosen)])
        print(number, len(x), y.max().item())


if __name__ == "__main__":
    torch.manual_seed(0)
    optimize(Settings())
