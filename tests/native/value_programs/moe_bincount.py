"""Experts by counts: the batch is split into parts of those sizes."""

import sys

import torch

device = sys.argv[1] if len(sys.argv) > 1 else "cuda"
torch.manual_seed(0)
router = torch.nn.Linear(1024, 8).to(device)
wide = torch.nn.Linear(1024, 1024).to(device)
x = wide(torch.randn(256, 1024).to(device))
choice = router(x).argmax(-1)
counts = torch.bincount(choice, minlength=8).tolist()
parts = x[choice.argsort()].split(counts)
print("counts", counts, [len(part) for part in parts])
