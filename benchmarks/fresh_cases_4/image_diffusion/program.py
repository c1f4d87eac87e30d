import copy

import torch
import torch.nn.functional as F
from torch import nn


class Block(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.norm = nn.GroupNorm(8, channels)
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)
        self.time = nn.Linear(64, channels)

    def forward(self, x, t):
        return x + self.conv(F.silu(self.norm(x))) + self.time(t)[:, :, None, None]


class Denoiser(nn.Module):
    def __init__(self, channels=64):
        super().__init__()
        self.first, self.last = (
            nn.Conv2d(3, channels, 3, padding=1),
            nn.Conv2d(channels, 3, 3, padding=1),
        )
        self.down = nn.ModuleList(Block(channels) for _ in range(3))
        self.up = nn.ModuleList(Block(channels) for _ in range(3))

    def forward(self, x, t):
        t = torch.cat([(t[:, None] * 2**i).sin() for i in range(64)], 1)
        x, skips = self.first(x), []
        for block in self.down:
            skips.append(x := block(x, t))
        for block in self.up:
            x = block(x + skips.pop(), t)
        return self.last(x)


class Diffusion:
    def __init__(self, model, steps=8, decay=0.999):
        self.model, self.steps, self.decay = model.cuda(), steps, decay
        self.ema = copy.deepcopy(self.model).requires_grad_(False)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=2e-4)

    def train_step(self, images):
        t = torch.rand(len(images), device=images.device)
        noise = torch.randn_like(images)
        loss = F.mse_loss(self.model(images + t[:, None, None, None] * noise, t), noise)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self.optimizer.step()
        with torch.no_grad():
            for average, parameter in zip(self.ema.parameters(), self.model.parameters()):
                average.lerp_(parameter, 1 - self.decay)
        return loss.item()

    @torch.no_grad()
    def sample(self, count, side):
        x = torch.randn(count, 3, side, side, device="cuda")
        for step in reversed(range(self.steps)):
            t = torch.full((count,), (step + 1) / self.steps, device="cuda")
            x = x - self.ema(x, t) / self.steps
        return x.cpu()


def main():
    torch.manual_seed(0)
    diffusion = Diffusion(Denoiser())
    for epoch in range(2):
        losses = [diffusion.train_step(torch.rand(8, 3, 64, 64).cuda()) for _ in range(3)]
        print(epoch, losses[-1], diffusion.sample(4, 64).shape)


if __name__ == "__main__":
    main()
