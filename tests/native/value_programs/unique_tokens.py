"""Distinct predictions, one row of a table for each."""

import sys

import torch

device = sys.argv[1] if len(sys.argv) > 1 else "cuda"
torch.manual_seed(0)
model = torch.nn.Linear(1024, 1024).to(device)
with torch.no_grad():
    predicted = model(torch.randn(512, 1024).to(device)).argmax(1)
    distinct, counts = predicted.unique(return_counts=True)
    table = torch.zeros(distinct.numel(), 1024, device=device)
print("distinct", distinct.numel(), tuple(table.shape), counts.max().item())
