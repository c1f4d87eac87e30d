"""Checks gradients in a helper, as mixed precision by hand does."""

import sys

import torch

device = sys.argv[1] if len(sys.argv) > 1 else "cuda"
torch.manual_seed(0)
model = torch.nn.Linear(1024, 1024).to(device)
optimizer = torch.optim.Adam(model.parameters())


def healthy(parameters):
    total = 0
    for parameter in parameters:
        bad = torch.isnan(parameter.grad) | torch.isinf(parameter.grad)
        total += int(bad.sum())
    return total == 0


taken = 0
for _ in range(3):
    loss = model(torch.randn(64, 1024).to(device)).square().mean()
    loss.backward()
    if healthy(model.parameters()):
        optimizer.step()
        taken += 1
    optimizer.zero_grad()
print("taken", taken)
