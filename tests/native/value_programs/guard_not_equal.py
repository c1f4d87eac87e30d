"""The oldest test for NaN: a number that differs from itself."""

import sys

import torch

device = sys.argv[1] if len(sys.argv) > 1 else "cuda"
torch.manual_seed(0)
model = torch.nn.Linear(1024, 1024).to(device)
skipped = done = 0
for _ in range(3):
    loss = model(torch.randn(64, 1024).to(device)).square().mean()
    value = loss.item()
    if value != value or bool(loss != loss):
        skipped += 1
        continue
    loss.backward()
    done += 1
print(done, skipped)
