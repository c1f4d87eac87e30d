"""ReduceLROnPlateau: the rate falls while the loss does not."""

import sys

import torch

device = sys.argv[1] if len(sys.argv) > 1 else "cuda"
torch.manual_seed(0)
model = torch.nn.Linear(1024, 1024).to(device)
optimizer = torch.optim.SGD(model.parameters(), 0.5)
schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=1, threshold=0.2)
x, y = torch.randn(64, 1024).to(device), torch.randn(64, 1024).to(device)
for _ in range(12):
    loss = (model(x) - y).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    schedule.step(loss.item())
print("rate", optimizer.param_groups[0]["lr"])
