import random

import torch
from torch import nn


class ImagePool:
    def __init__(self, size=12):
        self.size = size
        self.images = []

    def query(self, image):
        if len(self.images) < self.size:
            self.images.append(image)
            return image
        i = random.randrange(self.size)
        old, self.images[i] = self.images[i], image
        return old


random.seed(0)
generator = nn.Sequential(
    nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 3, 3, padding=1)
).cuda()
critic = nn.Sequential(
    nn.Conv2d(3, 8, 4, stride=4), nn.LeakyReLU(), nn.Conv2d(8, 1, 4, stride=4)
).cuda()
opt_d = torch.optim.Adam(critic.parameters(), lr=2e-4)
pool = ImagePool()
for step in range(16):
    real_a = torch.rand(4, 3, 256, 256, device="cuda")
    real_b = torch.rand(4, 3, 256, 256, device="cuda")
    fake_b = generator(real_a)
    fake = pool.query(fake_b)
    loss_d = (critic(real_b) - 1).pow(2).mean() + critic(fake.detach()).pow(2).mean()
    opt_d.zero_grad()
    loss_d.backward()
    opt_d.step()
print(loss_d.item())
