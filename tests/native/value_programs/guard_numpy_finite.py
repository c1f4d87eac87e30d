"""Stops where NumPy finds a loss that is not finite."""

import sys

import numpy as np
import torch

device = sys.argv[1] if len(sys.argv) > 1 else "cuda"
torch.manual_seed(0)
model = torch.nn.Linear(1024, 1024).to(device)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for step in range(3):
    loss = model(torch.randn(64, 1024).to(device)).square().mean()
    if not np.isfinite(loss.item()) or not np.isfinite(loss.detach().cpu().numpy()):
        raise RuntimeError("not finite")
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print("step", step)
