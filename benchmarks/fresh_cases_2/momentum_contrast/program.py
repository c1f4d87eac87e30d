import copy

import torch
import torch.nn.functional as F
from torch import nn


class Views(nn.Module):
    def __init__(self, width=32, out=128):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, width, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(width, out),
        )

    def forward(self, x):
        return F.normalize(self.layers(x), dim=1)


class Contrast:
    def __init__(self, model, temperature=0.1):
        self.online, self.average = model, copy.deepcopy(model).requires_grad_(False)
        self.temperature = temperature
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    @torch.no_grad()
    def update_average(self, decay=0.99):
        for average, online in zip(self.average.parameters(), self.online.parameters()):
            average.lerp_(online, 1 - decay)

    def step(self, first, second):
        self.optimizer.zero_grad()
        with torch.no_grad():
            keys = self.average(second)
        logits = self.online(first) @ keys.T / self.temperature
        loss = F.cross_entropy(logits, torch.arange(len(first), device="cuda"))
        loss.backward()
        self.optimizer.step()
        self.update_average()
        return loss.item()


contrast = Contrast(Views().cuda())
for step in range(4):
    first, second = (torch.randn(48, 3, 96, 96).cuda() for _ in range(2))
    print(step, contrast.step(first, second))
