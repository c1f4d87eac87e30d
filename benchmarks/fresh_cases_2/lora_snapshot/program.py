import torch
import torch.nn.functional as F
from torch import nn


class LoraLinear(nn.Module):
    """A linear layer into which an adapter can be merged, and taken out again."""

    def __init__(self, base):
        super().__init__()
        self.base = base
        self.snapshot = None

    @torch.no_grad()
    def merge(self, down, up, scale=1.0):
        self.snapshot = self.base.weight.detach().clone()
        self.base.weight += scale * (up @ down)

    @torch.no_grad()
    def unmerge(self):
        if self.snapshot is not None:
            self.base.weight.copy_(self.snapshot)
            self.snapshot = None

    def forward(self, x):
        return self.base(x)


class Denoiser(nn.Module):
    def __init__(self, width=1024, depth=4):
        super().__init__()
        self.inward = nn.ModuleList(LoraLinear(nn.Linear(width, 4 * width)) for _ in range(depth))
        self.outward = nn.ModuleList(LoraLinear(nn.Linear(4 * width, width)) for _ in range(depth))

    def forward(self, x):
        for inward, outward in zip(self.inward, self.outward):
            x = x + outward(F.gelu(inward(x)))
        return x


def load_adapter(model, rank=16):
    for layer in (*model.inward, *model.outward):
        out, width = layer.base.weight.shape
        layer.merge(torch.randn(rank, width).cuda() / width, torch.randn(out, rank).cuda())


@torch.no_grad()
def generate(model, steps=6):
    x = torch.randn(2048, 1024, device="cuda")
    for step in range(steps):
        x = x - 0.1 * model(x)
    return x.norm().item()


model = Denoiser().cuda()
load_adapter(model)
for request in range(2):
    print(request, generate(model))
