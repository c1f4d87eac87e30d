"""Random reviews."""

import torch


def reviews(batch_size, length, words, classes, count):
    for number in range(count):
        seed = torch.Generator().manual_seed(number)
        yield (
            torch.randint(words, (batch_size, length), generator=seed),
            torch.randint(classes, (batch_size,), generator=seed),
        )
