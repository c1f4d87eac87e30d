"""A hinge GAN as it should be: no graph through the generator for the critic's step."""

import torch
import torch.nn.functional as F
from torch import nn


class G(nn.Module):
    def __init__(self, latent=64, width=64):
        super().__init__()
        self.fc = nn.Linear(latent, width * 64)
        self.blocks = nn.ModuleList(nn.Conv2d(width, width, 3, padding=1) for _ in range(2))
        self.rgb = nn.Conv2d(width, 3, 3, padding=1)
        self.width = width

    def forward(self, z):
        x = self.fc(z).view(-1, self.width, 8, 8)
        for conv in self.blocks:
            x = F.relu(conv(F.interpolate(x, scale_factor=2)))
        return self.rgb(x).tanh()


class D(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.convs = nn.ModuleList(
            nn.utils.parametrizations.spectral_norm(nn.Conv2d(a, b, 4, 2, 1))
            for a, b in ((3, width), (width, 2 * width), (2 * width, 4 * width))
        )
        self.out = nn.Linear(4 * width, 1)

    def forward(self, x):
        for conv in self.convs:
            x = F.leaky_relu(conv(x), 0.1)
        return self.out(x.sum((2, 3)))


class Training:
    def __init__(self):
        self.g, self.d = G().cuda(), D().cuda()
        self.average = G().cuda().requires_grad_(False)
        self.average.load_state_dict(self.g.state_dict())
        self.opt_g = torch.optim.Adam(self.g.parameters(), 1e-4, (0.0, 0.9))
        self.opt_d = torch.optim.Adam(self.d.parameters(), 4e-4, (0.0, 0.9))

    def critic(self, real):
        self.d.requires_grad_(True)
        with torch.no_grad():
            fake = self.g(torch.randn(len(real), 64, device="cuda"))
        loss = F.relu(1 - self.d(real)).mean() + F.relu(1 + self.d(fake)).mean()
        self.opt_d.zero_grad()
        loss.backward()
        self.opt_d.step()
        return loss.item()

    def generator(self, size):
        self.d.requires_grad_(False)
        loss = -self.d(self.g(torch.randn(size, 64, device="cuda"))).mean()
        self.opt_g.zero_grad()
        loss.backward()
        self.opt_g.step()
        with torch.no_grad():
            for a, b in zip(self.average.parameters(), self.g.parameters()):
                a.lerp_(b, 0.01)
        return loss.item()

    @torch.no_grad()
    def sample(self, count):
        return self.average(torch.randn(count, 64, device="cuda")).mul(127.5).byte().cpu()


if __name__ == "__main__":
    torch.manual_seed(0)
    training = Training()
    for step in range(4):
        d = training.critic(torch.rand(64, 3, 32, 32).cuda() * 2 - 1)
        print(step, d, training.generator(64))
    print(training.sample(16).shape)
