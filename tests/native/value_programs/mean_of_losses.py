"""Means of losses by NumPy, statistics and torch decide."""

import statistics
import sys

import numpy as np
import torch

device = sys.argv[1] if len(sys.argv) > 1 else "cuda"
torch.manual_seed(0)
model = torch.nn.Linear(1024, 1024).to(device)
losses = [model(torch.randn(16, 1024).to(device)).square().mean().item() for _ in range(4)]
chosen = []
if np.mean(losses) < 0.34:
    chosen.append("numpy")
if statistics.fmean(losses) < 0.34:
    chosen.append("statistics")
if torch.tensor(losses).mean() < 0.34:
    chosen.append("torch")
if sum(losses) / len(losses) < 0.34:
    chosen.append("sum")
print("chosen", chosen, f"{np.std(losses):.4f}")
