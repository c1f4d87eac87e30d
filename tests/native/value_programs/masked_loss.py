"""A loss over the hardest half of the examples."""

import sys

import torch

device = sys.argv[1] if len(sys.argv) > 1 else "cuda"
torch.manual_seed(0)
model = torch.nn.Linear(1024, 1024).to(device)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(3):
    x = torch.randn(128, 1024).to(device)
    each = model(x).square().mean(1)
    hard = each > each.mean()
    chosen = each[hard]
    if chosen.numel() == 0:
        continue
    chosen.mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    print("chosen", chosen.numel())
