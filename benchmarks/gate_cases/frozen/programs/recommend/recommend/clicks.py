"""Random clicks."""

import torch


class Clicks:
    def __init__(self, batch_size, dense, rows, lookups):
        self.batch_size = batch_size
        self.dense = dense
        self.rows = rows
        self.lookups = lookups

    def batches(self, count):
        for number in range(count):
            seed = torch.Generator().manual_seed(number)
            dense = torch.rand(self.batch_size, self.dense, generator=seed)
            shape = (self.batch_size, self.lookups)
            sparse = [torch.randint(rows, shape, generator=seed) for rows in self.rows]
            clicked = torch.randint(2, (self.batch_size,), generator=seed).float()
            yield dense, torch.stack(sparse), clicked
