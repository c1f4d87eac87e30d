"""Clips of bytes from pageable memory, converted on the GPU."""

import torch
import torch.nn as nn

model = nn.Sequential(nn.Conv3d(3, 16, 8, stride=8), nn.ReLU(), nn.Flatten(), nn.LazyLinear(10))
model.cuda()
clips = torch.zeros(32, 3, 16, 224, 224, dtype=torch.uint8)
model(clips[:1].cuda().float())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(4):
    x = clips.to("cuda").half().div_(255).float()
    loss = model(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
