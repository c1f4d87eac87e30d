"""Skips batches whose loss is NaN."""

import math
import sys

import torch

device = sys.argv[1] if len(sys.argv) > 1 else "cuda"
torch.manual_seed(0)
model = torch.nn.Linear(1024, 1024).to(device)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
done = 0
for _ in range(4):
    loss = model(torch.randn(64, 1024).to(device)).square().mean()
    if math.isnan(loss.item()):
        continue
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    done += 1
print("steps", done)
