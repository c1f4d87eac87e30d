"""DCGAN on random images."""

import torch
from torch import nn


class Generator(nn.Module):
    def __init__(self, nz=64, ngf=48):
        super().__init__()
        self.main = nn.Sequential(
            nn.ConvTranspose2d(nz, ngf * 4, 4, 1, 0, bias=False),
            nn.BatchNorm2d(ngf * 4),
            nn.ReLU(),
            nn.ConvTranspose2d(ngf * 4, ngf * 2, 4, 2, 1, bias=False),
            nn.BatchNorm2d(ngf * 2),
            nn.ReLU(),
            nn.ConvTranspose2d(ngf * 2, ngf, 4, 2, 1, bias=False),
            nn.BatchNorm2d(ngf),
            nn.ReLU(),
            nn.ConvTranspose2d(ngf, ngf, 4, 2, 1, bias=False),
            nn.BatchNorm2d(ngf),
            nn.ReLU(),
            nn.Conv2d(ngf, 3, 3, padding=1),
            nn.Tanh(),
        )

    def forward(self, z):
        return self.main(z)


class Discriminator(nn.Module):
    def __init__(self, ndf=32):
        super().__init__()
        self.main = nn.Sequential(
            nn.Conv2d(3, ndf, 4, 2, 1, bias=False),
            nn.LeakyReLU(0.2),
            nn.Conv2d(ndf, ndf * 2, 4, 2, 1, bias=False),
            nn.LeakyReLU(0.2),
            nn.Conv2d(ndf * 2, 1, 8, 1, 0, bias=False),
        )

    def forward(self, x):
        return self.main(x).view(-1)


criterion = nn.BCEWithLogitsLoss()


def train_d(netD, netG, optimizerD, real, noise):
    optimizerD.zero_grad()
    errD_real = criterion(netD(real), torch.ones(len(real), device="cuda"))
    errD_real.backward()
    fake = netG(noise)
    errD_fake = criterion(netD(fake), torch.zeros(len(real), device="cuda"))
    errD_fake.backward()
    optimizerD.step()
    return (errD_real + errD_fake).item()


def train_g(netD, netG, optimizerG, noise):
    optimizerG.zero_grad()
    netD.requires_grad_(False)
    errG = criterion(netD(netG(noise)), torch.ones(len(noise), device="cuda"))
    errG.backward()
    optimizerG.step()
    netD.requires_grad_(True)
    return errG.item()


def main(iterations=4, critics=5):
    torch.manual_seed(0)
    netG, netD = Generator().cuda(), Discriminator().cuda()
    optimizerD = torch.optim.Adam(netD.parameters(), lr=2e-4, betas=(0.5, 0.999))
    optimizerG = torch.optim.Adam(netG.parameters(), lr=2e-4, betas=(0.5, 0.999))
    for i in range(iterations):
        for _ in range(critics):
            real = torch.rand(96, 3, 32, 32).cuda() * 2 - 1
            d = train_d(netD, netG, optimizerD, real, torch.randn(96, 64, 1, 1).cuda())
        g = train_g(netD, netG, optimizerG, torch.randn(32, 64, 1, 1).cuda())
        print(i, d, g)


if __name__ == "__main__":
    main()
