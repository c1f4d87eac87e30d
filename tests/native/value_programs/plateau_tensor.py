"""A plateau scheduler that gets the tensor, and a stop at the least rate."""

import sys

import torch

device = sys.argv[1] if len(sys.argv) > 1 else "cuda"
torch.manual_seed(0)
model = torch.nn.Linear(1024, 1024).to(device)
optimizer = torch.optim.SGD(model.parameters(), 0.4)
schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(
    optimizer, patience=0, factor=0.1, threshold=0.05
)
x, y = torch.randn(64, 1024).to(device), torch.randn(64, 1024).to(device)
for epoch in range(25):
    loss = (model(x) - y).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    schedule.step(loss.detach())
    if optimizer.param_groups[0]["lr"] < 1e-3:
        break
print("epoch", epoch)
