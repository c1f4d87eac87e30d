"""Float32 images from pinned memory, on the stream that computes."""

import torch
import torch.nn as nn

model = nn.Sequential(
    nn.Conv2d(3, 64, 16, stride=16), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
    nn.Linear(64, 1000),
).cuda()  # fmt: skip
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
images = torch.empty(512, 3, 224, 224).pin_memory()
labels = torch.zeros(512, dtype=torch.int64).pin_memory()
for _ in range(4):
    x = images.to("cuda", non_blocking=True)
    y = labels.to("cuda", non_blocking=True)
    loss = nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
