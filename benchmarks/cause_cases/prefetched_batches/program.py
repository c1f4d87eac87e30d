from collections import deque

import torch
from torch import nn


def iter_batches(count):
    for i in range(count):
        yield torch.full((32, 3, 224, 224), float(i))


def prefetched(batches, prefetch_batches):
    ready = deque()
    for batch in batches:
        ready.append(batch.cuda())
        if len(ready) > prefetch_batches:
            yield ready.popleft()
    while ready:
        yield ready.popleft()


model = nn.Conv2d(3, 2, 16, stride=16).cuda()
total = 0.0
with torch.no_grad():
    for x in prefetched(iter_batches(24), prefetch_batches=16):
        total += model(x).mean().item()
print(total)
