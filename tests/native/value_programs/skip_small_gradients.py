"""Parameters whose gradient is small are not updated."""

import sys

import torch

device = sys.argv[1] if len(sys.argv) > 1 else "cuda"
torch.manual_seed(0)
model = torch.nn.Sequential(*[torch.nn.Linear(1024, 1024) for _ in range(3)]).to(device)
model(torch.randn(16, 1024).to(device)).square().mean().backward()
updated = 0
for parameter in model.parameters():
    if parameter.grad.norm() > 1e-2:
        parameter.data -= 0.1 * parameter.grad
        updated += 1
print("updated", updated)
