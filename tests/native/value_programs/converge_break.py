"""An endless loop with a break at the tolerance."""

import sys

import torch

device = sys.argv[1] if len(sys.argv) > 1 else "cuda"
torch.manual_seed(0)
matrix = torch.rand(1024, 1024).to(device)
matrix = matrix / matrix.sum(0, keepdim=True)
rank = torch.full((1024, 1), 1 / 1024).to(device)
steps = 0
while True:
    new = 0.15 / 1024 + 0.85 * (matrix @ rank)
    change = (new - rank).abs().sum()
    rank = new
    steps += 1
    if change < 1e-5:
        break
print("steps", steps)
