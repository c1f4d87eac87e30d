"""Frozen weights that stay in pinned memory and are copied for each layer."""

import torch
import torch.nn as nn
import torch.nn.functional as F

weights = [torch.empty(4096, 4096, dtype=torch.float16).pin_memory() for _ in range(6)]
adapter = nn.Linear(4096, 4096, bias=False, device="cuda", dtype=torch.float16)
optimizer = torch.optim.SGD(adapter.parameters(), lr=0.01)
x = torch.randn(64, 4096, device="cuda", dtype=torch.float16)
for _ in range(4):
    y = x
    with torch.no_grad():
        for weight in weights:
            y = torch.relu(F.linear(y, weight.to("cuda", non_blocking=True)))
    loss = adapter(y).float().square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
