"""Momentum, weight decay and an average of weights by hand, for 200 small tensors."""

import torch
import torch.nn as nn

model = nn.Sequential(*[nn.Linear(96, 96) for _ in range(100)]).cuda()
momentum = [torch.zeros_like(p) for p in model.parameters()]
average = [p.detach().clone() for p in model.parameters()]
dummy = torch.optim.SGD(model.parameters(), lr=0.0)
x = torch.randn(64, 96, device="cuda")
for _ in range(4):
    loss = model(x).square().mean()
    dummy.zero_grad()
    loss.backward()
    with torch.no_grad():
        for p, m, a in zip(model.parameters(), momentum, average, strict=True):
            m.mul_(0.9).add_(p.grad)
            p.mul_(1 - 1e-4).sub_(m, alpha=0.01)
            a.lerp_(p, 0.001)
    dummy.step()
