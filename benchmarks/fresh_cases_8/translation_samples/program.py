"""Unpaired image translation, with a sheet of samples every so many iterations."""

import itertools

import numpy as np
import torch
from torch import nn


class ResnetBlock(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.conv1 = nn.Conv2d(dim, dim, 3, padding=1)
        self.norm1 = nn.InstanceNorm2d(dim)
        self.conv2 = nn.Conv2d(dim, dim, 3, padding=1)

    def forward(self, x):
        return x + self.conv2(torch.relu(self.norm1(self.conv1(x))))


def generator(dim=24, blocks=3):
    layers = [nn.Conv2d(3, dim, 7, padding=3), nn.ReLU()]
    layers += [ResnetBlock(dim) for _ in range(blocks)]
    return nn.Sequential(*layers, nn.Conv2d(dim, 3, 7, padding=3), nn.Tanh())


class Translator:
    def __init__(self, img_size=64, batch_size=1, sample_num=6, print_freq=4):
        self.img_size, self.batch_size = img_size, batch_size
        self.sample_num, self.print_freq = sample_num, print_freq
        self.genA2B, self.genB2A = generator().cuda(), generator().cuda()
        self.dis = nn.Sequential(nn.Conv2d(3, 32, 4, 2), nn.ReLU(), nn.Conv2d(32, 1, 4, 2)).cuda()
        gens = itertools.chain(self.genA2B.parameters(), self.genB2A.parameters())
        self.G_optim = torch.optim.Adam(gens, lr=1e-4, betas=(0.5, 0.999))

    def images(self, count):
        return torch.rand(count, 3, self.img_size, self.img_size).cuda() * 2 - 1

    def iterate(self):
        real_A, real_B = self.images(self.batch_size), self.images(self.batch_size)
        self.G_optim.zero_grad()
        fake_A2B = self.genA2B(real_A)
        fake_A2B2A = self.genB2A(fake_A2B)
        identity = self.genA2B(real_B)
        cycle = (fake_A2B2A - real_A).abs().mean() + (identity - real_B).abs().mean()
        loss = 10 * cycle + (self.dis(fake_A2B) - 1).square().mean()
        loss.backward()
        self.G_optim.step()
        return loss.item()

    def sample_sheet(self):
        self.genA2B.eval(), self.genB2A.eval()
        real_A = self.images(self.sample_num)
        fake_A2A = self.genB2A(real_A)
        fake_A2B = self.genA2B(real_A)
        fake_A2B2A = self.genB2A(fake_A2B)
        rows = [real_A, fake_A2A, fake_A2B, fake_A2B2A]
        sheet = np.concatenate([row.detach().cpu().numpy() for row in rows], 2)
        self.genA2B.train(), self.genB2A.train()
        return sheet

    def train(self, iterations):
        for step in range(1, iterations + 1):
            loss = self.iterate()
            if step % self.print_freq == 0:
                print(f"[{step}/{iterations}] {loss:.4f}", self.sample_sheet().shape)


torch.manual_seed(1)
Translator().train(8)
