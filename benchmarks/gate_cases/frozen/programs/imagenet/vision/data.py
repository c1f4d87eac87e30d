"""Random pictures, and how they reach the device."""

from collections import deque

import torch
from torch.utils.data import DataLoader, Dataset


class FakeImages(Dataset):
    def __init__(self, count, size, classes, seed):
        generator = torch.Generator().manual_seed(seed)
        self.images = torch.rand(count, 3, size, size, generator=generator)
        self.labels = torch.randint(classes, (count,), generator=generator)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return self.images[index], self.labels[index]


def loader(args, count, batch_size, shuffle, seed):
    images = FakeImages(count, args.image_size, args.classes, seed)
    return DataLoader(images, batch_size=batch_size, shuffle=shuffle, drop_last=True)


class Prefetcher:
    """Copies batches to the device before they are needed."""

    def __init__(self, loader, device, depth=2):
        self.loader = loader
        self.device = device
        self.depth = depth

    def __iter__(self):
        queue = deque()
        for images, target in self.loader:
            queue.append((images.to(self.device), target.to(self.device)))
            if len(queue) >= self.depth:
                yield queue.popleft()
        while queue:
            yield queue.popleft()
