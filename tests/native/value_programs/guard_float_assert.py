"""An assertion about a number made with float()."""

import math
import sys

import torch

device = sys.argv[1] if len(sys.argv) > 1 else "cuda"
torch.manual_seed(0)
model = torch.nn.Linear(1024, 1024).to(device)
total = 0.0
for _ in range(3):
    loss = model(torch.randn(64, 1024).to(device)).square().mean()
    value = float(loss)
    assert math.isfinite(value), "diverged"
    total += value
    loss.backward()
assert not math.isnan(total / 3)
print("trained")
