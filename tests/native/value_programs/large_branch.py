"""A wide model whose batch doubles where the loss is low."""

import sys

import torch

device = sys.argv[1] if len(sys.argv) > 1 else "cuda"
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8192, 8192), torch.nn.Linear(8192, 8192)).to(device)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
batch = 256
for _ in range(3):
    loss = model(torch.randn(batch, 8192).to(device)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if loss.item() < 0.2:
        batch *= 2
print("batch", batch)
