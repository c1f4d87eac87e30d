"""Averages weights once the validation loss is below a bound."""

import sys

import torch

device = sys.argv[1] if len(sys.argv) > 1 else "cuda"
torch.manual_seed(0)
model = torch.nn.Linear(1024, 1024).to(device)
averaged = torch.optim.swa_utils.AveragedModel(model)
optimizer = torch.optim.SGD(model.parameters(), 3.0)
x = torch.randn(64, 1024).to(device)
updates = 0
for _ in range(10):
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if loss.detach().cpu() < 0.3:
        averaged.update_parameters(model)
        updates += 1
print("updates", updates, int(averaged.n_averaged))
