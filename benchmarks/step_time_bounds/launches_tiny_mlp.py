"""Eight layers of 64 with a batch of 32, and Adam parameter by parameter."""

import torch
import torch.nn as nn

layers = []
for _ in range(8):
    layers += [nn.Linear(64, 64), nn.ReLU()]
model = nn.Sequential(*layers).cuda()
optimizer = torch.optim.Adam(model.parameters(), foreach=False)
x = torch.randn(32, 64, device="cuda")
for _ in range(4):
    loss = model(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
