"""Prunes weights below a quantile, and keeps the rows that remain."""

import sys

import torch

device = sys.argv[1] if len(sys.argv) > 1 else "cuda"
torch.manual_seed(0)
weight = torch.nn.Linear(1024, 1024).to(device).weight.detach()
norms = weight.norm(dim=1)
bound = norms.quantile(0.3).item()
rows = [i for i, n in enumerate(norms.cpu().numpy()) if n > bound]
small = weight[torch.tensor(rows).to(device)]
print("rows", len(rows), tuple(small.shape))
