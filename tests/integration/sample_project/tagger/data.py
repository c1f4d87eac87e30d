"""Texts as tokens. They are drawn, so that the project needs no download."""

from __future__ import annotations

import torch
from torch.utils.data import DataLoader, Dataset

BATCH_SIZE = 16
LENGTH = 64
VOCABULARY = 512
SUBJECTS = 8


class Texts(Dataset):
    """``count`` texts of `LENGTH` tokens, each with its subject."""

    def __init__(self, count: int, seed: int) -> None:
        draw = torch.Generator().manual_seed(seed)
        self.tokens = torch.randint(VOCABULARY, (count, LENGTH), generator=draw)
        self.subjects = torch.randint(SUBJECTS, (count,), generator=draw)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.tokens[index], self.subjects[index]


def loaders(seed: int) -> tuple[DataLoader, DataLoader]:
    """Texts to learn from, and texts to check with."""
    train = DataLoader(Texts(2 * BATCH_SIZE, seed), batch_size=BATCH_SIZE, shuffle=True)
    held_back = DataLoader(Texts(BATCH_SIZE, seed + 1), batch_size=BATCH_SIZE)
    return train, held_back
