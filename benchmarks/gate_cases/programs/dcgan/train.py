"""Trains two networks against each other."""

import torch
import torch.nn as nn

import options
from networks import Discriminator, Generator, weights_init

device = torch.device("cuda")


def dataloader(opt, seed=5):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(opt.steps):
        yield torch.rand(opt.batchSize, 3, opt.imageSize, opt.imageSize, generator=generator)


def sample(netG, noise):
    """Images of a fixed noise, for the eye."""
    with torch.no_grad():
        return netG(noise).cpu()


def main():
    opt = options.parse()
    torch.manual_seed(opt.manualSeed)
    netG = Generator(opt.nz, opt.ngf).to(device)
    netG.apply(weights_init)
    netD = Discriminator(opt.ndf).to(device)
    netD.apply(weights_init)
    criterion = nn.BCEWithLogitsLoss()
    fixed_noise = torch.randn(opt.samples, opt.nz, 1, 1, device=device)
    betas = (opt.beta1, 0.999)
    optimizerD = torch.optim.Adam(netD.parameters(), lr=opt.lr, betas=betas, foreach=False)
    optimizerG = torch.optim.Adam(netG.parameters(), lr=opt.lr, betas=betas, foreach=False)
    img_list = []

    for epoch in range(opt.niter):
        for i, data in enumerate(dataloader(opt)):
            # (1) Update D network: maximize log(D(x)) + log(1 - D(G(z)))
            netD.zero_grad()
            real = data.to(device)
            label = torch.ones(len(real), device=device)
            output = netD(real)
            errD_real = criterion(output, label)
            errD_real.backward()
            D_x = output.mean().item()

            noise = torch.randn(len(real), opt.nz, 1, 1, device=device)
            fake = netG(noise)
            label.fill_(0)
            output = netD(fake.detach())
            errD_fake = criterion(output, label)
            errD_fake.backward()
            errD = errD_real.item() + errD_fake.item()
            optimizerD.step()

            # (2) Update G network: maximize log(D(G(z)))
            netG.zero_grad()
            label.fill_(1)
            output = netD(fake)
            errG = criterion(output, label)
            errG.backward()
            optimizerG.step()
            print(f"[{epoch}][{i}] Loss_D: {errD:.4f} Loss_G: {errG.item():.4f} D(x): {D_x:.4f}")
            img_list.append(sample(netG, fixed_noise))
    print(len(img_list))


if __name__ == "__main__":
    main()
