"""A recurrent cell called in a Python loop of 200 steps."""

import torch
import torch.nn as nn

cell = nn.GRUCell(128, 128, device="cuda")
optimizer = torch.optim.Adam(cell.parameters())
x = torch.randn(200, 16, 128, device="cuda")
for _ in range(4):
    h = torch.zeros(16, 128, device="cuda")
    loss = 0.0
    for t in range(200):
        h = cell(x[t], h)
        loss = loss + h.square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
