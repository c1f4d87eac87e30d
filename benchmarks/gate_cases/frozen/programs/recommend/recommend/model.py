"""A model of clicks: tables for categories, layers for numbers, and their interactions."""

from itertools import pairwise

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


def layers_of(sizes):
    found = []
    for one, two in pairwise(sizes):
        found += [nn.Linear(one, two), nn.ReLU()]
    return nn.Sequential(*found)


class ClickModel(nn.Module):
    def __init__(self, rows, width, dense, bottom, top, recompute):
        super().__init__()
        self.tables = nn.ModuleList(
            nn.EmbeddingBag(count, width, mode="sum", sparse=True) for count in rows
        )
        self.bottom = layers_of([dense, *bottom, width])
        pairs = (len(rows) + 1) * len(rows) // 2
        self.top = layers_of([width + pairs, *top])
        self.output = nn.Linear(top[-1], 1)
        self.recompute = recompute

    def layers(self):
        return [
            *self.bottom.parameters(),
            *self.top.parameters(),
            *self.output.parameters(),
        ]

    def interact(self, dense, found):
        stacked = torch.stack([dense, *found], dim=1)
        products = torch.bmm(stacked, stacked.transpose(1, 2))
        count = stacked.shape[1]
        i, j = torch.tril_indices(count, count, offset=-1, device=dense.device)
        return torch.cat([dense, products[:, i, j]], dim=1)

    def forward(self, dense, sparse):
        if self.recompute and self.training:
            numbers = checkpoint(self.bottom, dense, use_reentrant=False)
        else:
            numbers = self.bottom(dense)
        found = [table(part) for table, part in zip(self.tables, sparse)]
        features = self.interact(numbers, found)
        return self.output(self.top(features)).squeeze(1), features
