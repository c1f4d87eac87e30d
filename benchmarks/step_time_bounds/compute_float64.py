"""Factorization of a matrix in double precision."""

import torch

target = torch.randn(6144, 6144, device="cuda", dtype=torch.float64)
left = torch.randn(6144, 3072, device="cuda", dtype=torch.float64, requires_grad=True)
right = torch.randn(3072, 6144, device="cuda", dtype=torch.float64, requires_grad=True)
optimizer = torch.optim.SGD([left, right], lr=1e-3)
for _ in range(4):
    loss = (left @ right - target).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
