"""A wide model that stops early, and logs to JSON."""

import json
import sys

import torch

device = sys.argv[1] if len(sys.argv) > 1 else "cuda"
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8192, 8192), torch.nn.Linear(8192, 8192)).to(device)
optimizer = torch.optim.SGD(model.parameters(), 0.5)
x = torch.randn(256, 8192).to(device)
best, waited, log = float("inf"), 0, []
for epoch in range(5):
    loss = (model(x) - 1).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    log.append(loss.item())
    if log[-1] > best * 0.98:
        waited += 1
        if waited == 2:
            break
    best = min(best, log[-1])
print("epoch", epoch, len(json.dumps(log)) > 0)
