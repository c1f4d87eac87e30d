"""A progressively grown critic, trained with the Wasserstein loss and its gradient penalty."""

import torch
from torch import nn


class Critic(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.from_rgb = nn.Conv2d(3, width, 4, stride=4)
        self.layers = nn.ModuleList(
            nn.Conv2d(width, width, 3, stride=2, padding=1) for _ in range(2)
        )
        self.final = nn.Linear(width, 1)

    def forward(self, x):
        x = nn.functional.softplus(self.from_rgb(x))
        for layer in self.layers:
            x = nn.functional.softplus(layer(x))
        return self.final(x.mean((2, 3))).squeeze(1)


class WGAN_GP:
    def __init__(self, dis, drift=0.001, reg_lambda=10):
        self.dis, self.drift, self.reg_lambda = dis, drift, reg_lambda

    def gradient_penalty(self, real_samps, fake_samps):
        epsilon = torch.rand(real_samps.shape[0], 1, 1, 1, device=real_samps.device)
        merged = epsilon * real_samps + (1 - epsilon) * fake_samps
        merged.requires_grad_(True)
        op = self.dis(merged)
        op.backward(gradient=torch.ones_like(op), retain_graph=True, create_graph=True)
        gradient = merged.grad.flatten(1)
        return self.reg_lambda * (gradient.norm(2, dim=1) - 1).square().mean()

    def dis_loss(self, real_samps, fake_samps):
        fake_out, real_out = self.dis(fake_samps), self.dis(real_samps)
        loss = fake_out.mean() - real_out.mean() + self.drift * real_out.square().mean()
        return loss + self.gradient_penalty(real_samps, fake_samps)


class ProGAN:
    def __init__(self, latent_size=16, size=160):
        self.latent_size, self.size = latent_size, size
        self.gen = nn.Sequential(nn.Linear(latent_size, 3 * size * size), nn.Tanh()).cuda()
        self.dis = Critic().cuda()
        self.dis_optim = torch.optim.Adam(self.dis.parameters(), 0.001, betas=(0.0, 0.99))
        self.loss = WGAN_GP(self.dis)

    def optimize_discriminator(self, real):
        with torch.no_grad():
            fake = self.gen(torch.randn(len(real), self.latent_size, device="cuda"))
        loss = self.loss.dis_loss(real, fake.view_as(real))
        self.dis_optim.zero_grad()
        loss.backward()
        self.dis_optim.step()
        self.dis_optim.zero_grad()
        return loss.item()


if __name__ == "__main__":
    torch.manual_seed(0)
    gan = ProGAN()
    for batch in range(10):
        images = torch.rand(8, 3, gan.size, gan.size).cuda() * 2 - 1
        print(batch, gan.optimize_discriminator(images))
