"""Depthwise convolutions with batch normalization, in float32, on an A100."""

import torch
import torch.nn as nn


def block(channels):
    return nn.Sequential(
        nn.Conv2d(channels, channels, 3, padding=1, groups=channels, bias=False),
        nn.BatchNorm2d(channels),
        nn.ReLU6(),
        nn.Conv2d(channels, 32, 1, bias=False),
        nn.BatchNorm2d(32),
        nn.Conv2d(32, channels, 1, bias=False),
        nn.BatchNorm2d(channels),
        nn.ReLU6(),
    )


model = nn.Sequential(block(192), block(192), block(192)).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
x = torch.randn(64, 192, 56, 56, device="cuda")
for _ in range(4):
    loss = model(x).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
