"""A PPO update that stops at a divergence, with an adaptive coefficient."""

import sys

import torch

device = sys.argv[1] if len(sys.argv) > 1 else "cuda"
torch.manual_seed(0)
policy = torch.nn.Linear(1024, 1024).to(device)
optimizer = torch.optim.SGD(policy.parameters(), 2.0)
x = torch.randn(64, 1024).to(device)
with torch.no_grad():
    old = torch.log_softmax(policy(x), -1)
coefficient, epochs = 0.2, 0
for _ in range(10):
    new = torch.log_softmax(policy(x), -1)
    divergence = (old.exp() * (old - new)).sum(-1).mean()
    if divergence.item() > 0.01:
        coefficient *= 2
        break
    if divergence.item() < 0.001:
        coefficient /= 2
    (coefficient * divergence - new[:, 0].mean()).backward()
    optimizer.step()
    optimizer.zero_grad()
    epochs += 1
print("epochs", epochs, "coefficient", coefficient)
