"""The batch follows from free memory, and grows while the loss falls."""

import sys

import torch

device = sys.argv[1] if len(sys.argv) > 1 else "cuda"
torch.manual_seed(0)
model = torch.nn.Linear(1024, 1024).to(device)
optimizer = torch.optim.SGD(model.parameters(), 0.5)
free = torch.cuda.mem_get_info()[0] if device == "cuda" else 14 << 30
batch = 32 if free > 1 << 30 else 1
last = None
for _ in range(4):
    loss = model(torch.ones(batch, 1024).to(device)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if last is None or loss.item() < last:
        batch *= 2
    last = loss.item()
    print("batch", batch)
