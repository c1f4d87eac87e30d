"""Each sample alone, with its loss read on the host."""

import torch
import torch.nn as nn

model = nn.Sequential(nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 10)).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x = torch.randn(64, 256, device="cuda")
y = torch.randint(0, 10, (64,), device="cuda")
for _ in range(4):
    optimizer.zero_grad()
    total = 0.0
    for sample, label in zip(x, y, strict=True):
        loss = nn.functional.cross_entropy(model(sample[None]), label[None]) / 64
        loss.backward()
        total += float(loss)
    optimizer.step()
