"""A regression on a table: everything is on the GPU, as it is small."""

import numpy as np
import torch
import torch.nn as nn


class Table:
    def __init__(self, rows, columns, seed=0):
        rng = np.random.default_rng(seed)
        features = rng.normal(size=(rows, columns))
        target = features[:, :3].sum(axis=1) + 0.1 * rng.normal(size=rows)
        self.x = torch.from_numpy(features).cuda()
        self.y = torch.from_numpy(target).cuda()

    def __len__(self):
        return len(self.y)

    def shuffled(self, batch_size):
        order = torch.randperm(len(self), device="cuda")
        for chosen in order.split(batch_size):
            yield self.x[chosen].float(), self.y[chosen].float()


class Regressor(nn.Sequential):
    def __init__(self, columns, hidden=128):
        super().__init__(
            nn.Linear(columns, hidden), nn.SiLU(), nn.Linear(hidden, hidden), nn.SiLU()
        )
        self.append(nn.Linear(hidden, 1))


def fit(model, table, epochs, batch_size=8192):
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for epoch in range(epochs):
        total = 0.0
        for x, y in table.shuffled(batch_size):
            loss = nn.functional.mse_loss(model(x).squeeze(-1), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item()
        print(epoch, total)


torch.manual_seed(0)
table = Table(rows=65536, columns=120)
fit(Regressor(120).cuda(), table, epochs=2)
