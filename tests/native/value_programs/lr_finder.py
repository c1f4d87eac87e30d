"""A range test that ends where the loss is four times the least."""

import sys

import torch

device = sys.argv[1] if len(sys.argv) > 1 else "cuda"
torch.manual_seed(0)
model = torch.nn.Linear(1024, 1024).to(device)
optimizer = torch.optim.SGD(model.parameters(), 1e-3)
x, y = torch.randn(64, 1024).to(device), torch.randn(64, 1024).to(device)
least, tried = None, 0
for _ in range(60):
    loss = (model(x) - y).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    value = loss.item()
    tried += 1
    if least is None or value < least:
        least = value
    if value > 4 * least:
        break
    for group in optimizer.param_groups:
        group["lr"] *= 1.6
print("tried", tried)
