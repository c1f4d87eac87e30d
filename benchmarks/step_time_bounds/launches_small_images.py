"""A ResNet-like network for 16 images of 32x32, on an H100."""

import torch
import torch.nn as nn


class Block(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)

    def forward(self, x):
        y = torch.relu(self.norm1(self.conv1(x)))
        return torch.relu(x + self.norm2(self.conv2(y)))


model = nn.Sequential(
    nn.Conv2d(3, 16, 3, padding=1), *[Block(16) for _ in range(9)], nn.AdaptiveAvgPool2d(1),
    nn.Flatten(), nn.Linear(16, 10),
).cuda()  # fmt: skip
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
x = torch.randn(16, 3, 32, 32, device="cuda")
y = torch.randint(0, 10, (16,), device="cuda")
for _ in range(4):
    loss = nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
