"""Training: ``python -m tagger.train``."""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

from tagger.data import LENGTH, SUBJECTS, VOCABULARY, loaders
from tagger.evaluate import accuracy
from tagger.model import Tagger


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def pair_counts(loader: DataLoader, device: torch.device) -> torch.Tensor:
    """How often each token stands with each subject, by place in the text."""
    counts = torch.zeros(LENGTH, VOCABULARY, SUBJECTS, device=device)
    for tokens, subjects in loader:
        marks = F.one_hot(subjects, SUBJECTS).float().to(device)
        for place in range(0, LENGTH, 16):
            counts[place].index_add_(0, tokens[:, place].to(device), marks)
    return counts


def train_epoch(
    model: nn.Module,
    loader: DataLoader,
    optimizer: torch.optim.Optimizer,
    weights: torch.Tensor,
    device: torch.device,
) -> float:
    """The mean loss."""
    total = torch.zeros((), device=device)
    for tokens, subjects in loader:
        tokens = tokens.to(device)
        subjects = subjects.to(device)
        with torch.autocast(device.type, dtype=torch.bfloat16):
            scores = model(tokens)
            loss = F.cross_entropy(scores, subjects, weight=weights)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.detach()
    return total.item() / len(loader)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    train, held_back = loaders(options.seed)
    model = Tagger().to(device)
    optimizer = make_optimizer(model)
    counts = pair_counts(train, device)
    weights = 1.0 / counts.sum(dim=(0, 1)).clamp(min=1.0)
    del counts
    for epoch in range(options.epochs):
        loss = train_epoch(model, train, optimizer, weights, device)
        share = accuracy(model, held_back, device)
        print(f"epoch {epoch}: loss {loss:.3f}, right {share:.0%}")


if __name__ == "__main__":
    main()
