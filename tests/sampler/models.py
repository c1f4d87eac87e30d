"""Small training loops in plain torch, for sampler tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


class Mlp(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.first = nn.Linear(16, width)
        self.norm = nn.BatchNorm1d(width)
        self.last = nn.Linear(width, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.relu(self.norm(self.first(x))))


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.body, x, use_reentrant=False)


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: int,
    step: Callable[[], Any] | None = None,
) -> list[float]:
    """Plain training on random data from a fixed seed; the loss of every step."""
    generator = torch.Generator().manual_seed(7)
    losses = []
    for _ in range(steps):
        x = torch.randn(8, 16, generator=generator)
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def seeded(factory: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(3)
    return factory()
