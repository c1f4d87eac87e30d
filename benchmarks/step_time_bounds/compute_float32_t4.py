"""A plain network in float32 on a GPU without TF32."""

import torch
import torch.nn as nn

model = nn.Sequential(
    nn.Linear(1024, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 2048),
    nn.ReLU(), nn.Linear(2048, 1000),
).cuda()  # fmt: skip
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x = torch.randn(1024, 1024, device="cuda")
y = torch.randint(0, 1000, (1024,), device="cuda")
for _ in range(4):
    loss = nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
