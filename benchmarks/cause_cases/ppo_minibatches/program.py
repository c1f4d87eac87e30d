import gc

import torch
from torch import nn

gc.disable()


class MiniBatch:
    def __init__(self, rollout, index, width=4096):
        self.rollout = rollout
        self.obs = torch.randn(width, 512, device="cuda")
        self.returns = torch.randn(width, device="cuda")
        self.index = index


class Rollout:
    def __init__(self, parts):
        self.parts = [MiniBatch(self, i) for i in range(parts)]


value = nn.Sequential(nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, 1)).cuda()
optimizer = torch.optim.Adam(value.parameters())
for iteration in range(6):
    rollout = Rollout(4)
    for part in rollout.parts:
        loss = (value(part.obs).squeeze(1) - part.returns).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    del rollout, part
    print(iteration, torch.cuda.memory_allocated() >> 20)
