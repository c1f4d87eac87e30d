"""Positions of games for an efficiently updatable network, fetched by threads."""

from concurrent.futures import ThreadPoolExecutor

import torch
from torch import nn


class Positions:
    """Two feature halves of each position, and its evaluation."""

    def __init__(self, batch_size, num_batches, features, seed=0):
        self.batch_size, self.num_batches, self.features = batch_size, num_batches, features
        self.seed = seed

    def __len__(self):
        return self.num_batches

    def __getitem__(self, index):
        random = torch.Generator().manual_seed(self.seed + index)
        us = torch.rand(self.batch_size, self.features, generator=random)
        return us, us.flip(1), torch.rand(self.batch_size, 1, generator=random)


class Feeder:
    def __init__(self, positions, device, workers=3):
        self.positions, self.device = positions, device
        self.pool = ThreadPoolExecutor(workers)

    def fetch(self, index):
        return [part.to(self.device) for part in self.positions[index]]

    def __iter__(self):
        ready = list(self.pool.map(self.fetch, range(len(self.positions))))
        while ready:
            yield ready.pop(0)


class NNUE(nn.Module):
    def __init__(self, features, l1=256, l2=32):
        super().__init__()
        self.input = nn.Linear(features, l1)
        self.l1 = nn.Linear(2 * l1, l2)
        self.output = nn.Linear(l2, 1)

    def forward(self, us, them):
        halves = torch.cat([self.input(us), self.input(them)], 1)
        return self.output(self.l1(halves.clamp(0, 1)).clamp(0, 1))


def train(features=1536, epochs=2):
    model = NNUE(features).cuda()
    optimizer = torch.optim.Adagrad(model.parameters(), lr=1e-3)
    for epoch in range(epochs):
        total = 0.0
        for us, them, outcome in Feeder(Positions(512, 16, features, 100 * epoch), "cuda"):
            loss = (model(us, them).sigmoid() - outcome).abs().pow(2.6).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item()
        print(epoch, total)


if __name__ == "__main__":
    torch.manual_seed(0)
    train()
