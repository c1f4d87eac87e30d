"""Online preference optimisation of a flow model, with a reference and an averaged policy."""

import copy
from contextlib import nullcontext

import torch
from torch import nn


class FlowTransformer(nn.Module):
    def __init__(self, width=768, layers=3):
        super().__init__()
        self.time = nn.Linear(1, width)
        self.inp = nn.Linear(64, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            for _ in range(layers)
        )
        self.out = nn.Linear(width, 64)

    def forward(self, x, t):
        h = self.inp(x) + self.time(t)
        for block in self.blocks:
            h = h + block(h)
        return self.out(h)


class FlowTrainer:
    def __init__(self, mixed_precision=True):
        self.policy = FlowTransformer().cuda()
        self.ref = copy.deepcopy(self.policy)
        self.old = copy.deepcopy(self.policy)
        self.optimizer = torch.optim.SGD(self.policy.parameters(), lr=1e-4)
        self.mixed_precision = mixed_precision

    def autocast(self):
        if not self.mixed_precision:
            return nullcontext()
        return torch.autocast("cuda", dtype=torch.float16)

    def velocity(self, model, x, t):
        return model(x, t)

    def losses(self, x, reward):
        t = torch.rand(len(x), 1, device=x.device)
        noise = torch.randn_like(x)
        xt, target = (1 - t) * x + t * noise, noise - x
        with torch.no_grad():
            v_ref = self.velocity(self.ref, xt, t)
            v_old = self.velocity(self.old, xt, t)
        v = self.velocity(self.policy, xt, t)
        better = (v - target).square().mean(1) - (v_old - target).square().mean(1)
        kl = (v - v_ref).square().mean()
        return (reward * better).mean() + 0.1 * kl

    def optimize(self, batches):
        with self.autocast():
            for x, reward in batches:
                loss = self.losses(x, reward)
                self.optimizer.zero_grad()
                loss.backward()
                self.optimizer.step()
                self.update_old(0.9)
                print(loss.item())

    @torch.no_grad()
    def update_old(self, decay):
        for old, new in zip(self.old.parameters(), self.policy.parameters(), strict=True):
            old.lerp_(new, 1 - decay)


if __name__ == "__main__":
    torch.manual_seed(0)
    samples = [(torch.randn(128, 64).cuda(), torch.randn(128).cuda()) for _ in range(3)]
    FlowTrainer().optimize(samples)
