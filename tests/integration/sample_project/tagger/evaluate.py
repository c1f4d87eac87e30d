"""How often the model is right on texts it has not seen."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import DataLoader


def accuracy(model: nn.Module, loader: DataLoader, device: torch.device) -> float:
    """The share of texts whose subject was named, 0 to 1."""
    model.eval()
    right = torch.zeros((), device=device)
    count = 0
    with torch.no_grad():
        for tokens, subjects in loader:
            scores = model(tokens.to(device))
            chances = scores.softmax(dim=1)
            right += chances.argmax(dim=1).eq(subjects.to(device)).sum()
            count += len(tokens)
    model.train()
    return right.item() / count
