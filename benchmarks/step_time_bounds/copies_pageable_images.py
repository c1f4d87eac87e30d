"""Float32 images from pageable memory to a small network."""

import torch
import torch.nn as nn

model = nn.Sequential(
    nn.Conv2d(3, 32, 7, stride=4, padding=3), nn.ReLU(), nn.Conv2d(32, 64, 3, stride=2, padding=1),
    nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 1000),
).cuda()  # fmt: skip
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
images = torch.empty(256, 3, 224, 224)
labels = torch.zeros(256, dtype=torch.int64)
for _ in range(4):
    x, y = images.cuda(), labels.cuda()
    loss = nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
