"""Random texts."""

import torch

from config import BATCH, LENGTH


def draw(vocabulary, count, seed):
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randint(vocabulary, (BATCH, LENGTH + 1), generator=generator) for _ in range(count)
    ]
