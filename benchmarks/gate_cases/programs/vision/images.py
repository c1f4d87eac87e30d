"""Pictures of noise, with labels."""

import torch
from torch.utils.data import Dataset


class Pictures(Dataset):
    def __init__(self, count, side):
        generator = torch.Generator().manual_seed(3)
        self.pixels = torch.randn(count, 3, side, side, generator=generator)
        self.labels = torch.randint(10, (count,), generator=generator)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return self.pixels[index], self.labels[index]
