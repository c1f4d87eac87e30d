import random

import torch
from torch import nn

random.seed(5)
max_length = 512
model = nn.Sequential(
    nn.Embedding(2000, 128), nn.Linear(128, 1024), nn.GELU(), nn.Linear(1024, 2)
).cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)


def collate(rows):
    ids = torch.zeros(len(rows), max_length, dtype=torch.long)
    for i, row in enumerate(rows):
        ids[i, : len(row)] = torch.tensor(row)
    return ids


for step in range(4):
    rows = [
        [random.randrange(1, 2000) for _ in range(random.randrange(40, 120))] for _ in range(32)
    ]
    ids = collate(rows).cuda()
    keep = (ids != 0)[..., None]
    logits = (model(ids) * keep).sum(1) / keep.sum(1)
    loss = logits.logsumexp(-1).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(loss.item())
