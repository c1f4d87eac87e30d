"""A physics-like update written with many pointwise operators."""

import torch
import torch.nn as nn

gain = nn.Parameter(torch.ones(1024, device="cuda"))
bias = nn.Parameter(torch.zeros(1024, device="cuda"))
optimizer = torch.optim.SGD([gain, bias], lr=0.01)
x = torch.randn(131072, 1024, device="cuda")
for _ in range(4):
    y = x * gain + bias
    y = torch.tanh(y) * torch.sigmoid(y)
    y = y - y.mean(dim=1, keepdim=True)
    y = y / (y.square().mean(dim=1, keepdim=True) + 1e-5).sqrt()
    loss = (y * y).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
