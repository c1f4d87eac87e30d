import torch
import torch.nn.functional as F
from torch import nn


class Generator(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, width, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(width, 3, 3, padding=1),
            nn.Tanh(),
        )

    def forward(self, landmarks):
        return self.layers(landmarks)


class Discriminator(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(6, width, 3, padding=1),
            nn.LeakyReLU(0.2),
            nn.Conv2d(width, width, 3, padding=1),
            nn.LeakyReLU(0.2),
        )
        self.score = nn.Linear(width, 1)

    def forward(self, image, landmarks):
        return self.score(self.layers(torch.cat([image, landmarks], 1)).mean((2, 3)))


def train_step(g, d, optimizer_g, optimizer_d, frames, landmarks):
    fake = g(landmarks)
    optimizer_d.zero_grad()
    loss_fake = F.relu(1 + d(fake.detach(), landmarks)).mean()
    loss_fake.backward(retain_graph=True)
    loss_real = F.relu(1 - d(frames, landmarks)).mean()
    loss_real.backward(retain_graph=True)
    optimizer_d.step()
    optimizer_g.zero_grad()
    d.requires_grad_(False)
    loss_g = F.l1_loss(fake, frames) - d(fake, landmarks).mean()
    loss_g.backward()
    d.requires_grad_(True)
    optimizer_g.step()
    return loss_g.item(), loss_fake.item() + loss_real.item()


g, d = Generator().cuda(), Discriminator().cuda()
optimizer_g = torch.optim.SGD(g.parameters(), lr=0.001)
optimizer_d = torch.optim.SGD(d.parameters(), lr=0.001)
for step in range(4):
    frames, landmarks = (torch.randn(8, 3, 128, 128).cuda() for _ in range(2))
    print(step, train_step(g, d, optimizer_g, optimizer_d, frames, landmarks))
