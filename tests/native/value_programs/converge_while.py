"""A loop until the value no longer changes."""

import sys

import torch

device = sys.argv[1] if len(sys.argv) > 1 else "cuda"
torch.manual_seed(0)
matrix = torch.randn(1024, 1024)
matrix = (matrix @ matrix.T / 1024 + torch.eye(1024)).to(device)
vector = torch.ones(1024, 1).to(device)
before, value, count = 0.0, 1.0, 0
while abs(value - before) > 1e-2:
    before = value
    product = matrix @ vector
    vector = product / product.norm()
    value = (vector.T @ matrix @ vector).item()
    count += 1
print("iterations", count, f"{value:.2f}")
