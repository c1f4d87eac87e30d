import random

import torch
from torch import nn


class ReplayBuffer:
    def __init__(self, capacity):
        self.obs = torch.zeros(capacity, 1024, device="cuda")
        self.reward = torch.zeros(capacity, device="cuda")
        self.size = 0

    def add(self, obs, reward):
        n = len(obs)
        self.obs[self.size : self.size + n] = obs
        self.reward[self.size : self.size + n] = reward
        self.size += n

    def sample(self, n):
        rows = torch.randint(0, self.size, (n,), device="cuda")
        return self.obs[rows], self.reward[rows]


random.seed(0)
q = nn.Sequential(nn.Linear(1024, 512), nn.ReLU(), nn.Linear(512, 1)).cuda()
optimizer = torch.optim.Adam(q.parameters())
buffer = ReplayBuffer(40960)
while buffer.size < 40960:
    buffer.add(torch.randn(4096, 1024, device="cuda"), torch.randn(4096, device="cuda"))
for update in range(6):
    obs, reward = buffer.sample(4096)
    loss = (q(obs).squeeze(1) - reward).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(loss.item())
