"""3x3 convolutions of 512 channels in half precision, channels last."""

import torch
import torch.nn as nn

layers = []
for _ in range(6):
    layers += [nn.Conv2d(512, 512, 3, padding=1, bias=False), nn.BatchNorm2d(512), nn.ReLU(True)]
model = nn.Sequential(*layers).to("cuda", torch.float16, memory_format=torch.channels_last)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, foreach=True)
for _ in range(4):
    x = torch.randn(128, 512, 28, 28, device="cuda", dtype=torch.float16)
    x = x.to(memory_format=torch.channels_last)
    model(x).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
