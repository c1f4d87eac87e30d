"""Large layers with a batch of 8: each weight is read for 8 products."""

import torch
import torch.nn as nn

layers = []
for _ in range(6):
    layers += [nn.Linear(8192, 8192, bias=False), nn.ReLU()]
model = nn.Sequential(*layers).to("cuda", torch.bfloat16)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=True)
x = torch.randn(8, 8192, device="cuda", dtype=torch.bfloat16)
for _ in range(4):
    loss = model(x).float().square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
