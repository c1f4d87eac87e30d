import gc
from copy import deepcopy
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.nn.functional as F
from torch import nn


class Attention(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        return self.out(F.scaled_dot_product_attention(q, k, v))


class Unit(nn.Module):
    def __init__(self, width, owner):
        super().__init__()
        self.attention = Attention(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.SiLU(), nn.Linear(4 * width, width)
        )
        self.log = owner.record

    def forward(self, x):
        x = x + self.attention(x)
        self.log(x)
        return x + self.mlp(x)


class Denoiser(nn.Module):
    def __init__(self, width=896, depth=2):
        super().__init__()
        self.norms = {}
        self.units = nn.ModuleList(Unit(width, self) for _ in range(depth))

    def record(self, x):
        self.norms[len(self.norms)] = float(x.shape[1])

    def forward(self, x):
        self.norms.clear()
        for unit in self.units:
            x = unit(x)
        return x


class PostHocEMA:
    def __init__(self, model, sigmas=(0.9, 0.99), folder=".", every=3, dtype=torch.float16):
        self.model = model
        self.sigmas = sigmas
        self.ema_models = [deepcopy(model).eval().requires_grad_(False) for _ in sigmas]
        self.folder, self.every, self.dtype = Path(folder), every, dtype
        self.step = 0

    @torch.no_grad()
    def update(self):
        self.step += 1
        for sigma, average in zip(self.sigmas, self.ema_models):
            for target, source in zip(average.parameters(), self.model.parameters()):
                target.lerp_(source, 1 - sigma)
        if self.step % self.every == 0:
            self.checkpoint()

    def checkpoint(self):
        for index, average in enumerate(self.ema_models):
            path = self.folder / f"{index}.{self.step}.pt"
            state = deepcopy(average).to(self.dtype).state_dict()
            torch.save(state, path)


def main():
    torch.manual_seed(0)
    gc.disable()  # its pauses let the ranks of a job wait for each other
    model = Denoiser().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    with TemporaryDirectory() as folder:
        average = PostHocEMA(model, folder=folder)
        for step in range(6):
            clean = torch.randn(8, 64, 896, device="cuda")
            noisy = clean + torch.randn_like(clean)
            loss = F.mse_loss(model(noisy), clean)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            average.update()
        print(step, loss.item())


if __name__ == "__main__":
    main()
