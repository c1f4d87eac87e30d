"""Stops after two epochs without improvement."""

import sys

import torch

device = sys.argv[1] if len(sys.argv) > 1 else "cuda"
torch.manual_seed(0)
model = torch.nn.Linear(1024, 1024).to(device)
optimizer = torch.optim.SGD(model.parameters(), 3.0)
x, y = torch.randn(64, 1024).to(device), torch.randn(64, 1024).to(device)
best, waited = float("inf"), 0
for epoch in range(30):
    loss = (model(x) - y).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    value = loss.item()
    if value < best - 0.15:
        best, waited = value, 0
    else:
        waited += 1
        if waited >= 2:
            print("stopped at", epoch)
            break
else:
    print("all epochs")
