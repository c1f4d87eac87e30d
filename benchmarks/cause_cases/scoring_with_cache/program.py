import torch
from torch import nn


class Layer(nn.Module):
    def __init__(self, width=512):
        super().__init__()
        self.q = nn.Linear(width, width)
        self.k = nn.Linear(width, width)
        self.v = nn.Linear(width, width)

    def forward(self, x):
        q, k, v = self.q(x), self.k(x), self.v(x)
        y = (q @ k.mT / 22).softmax(-1) @ v
        return x + y, (k, v)


class Model(nn.Module):
    def __init__(self, depth=12, use_cache=True):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(depth))
        self.use_cache = use_cache

    def forward(self, x):
        past = []
        for layer in self.layers:
            x, present = layer(x)
            if self.use_cache:
                past.append(present)
            del present
        return x, past


model = Model().cuda().eval()
scores = []
with torch.no_grad():
    for batch in range(2):
        x, past = model(torch.randn(24, 256, 512, device="cuda"))
        scores.append(x.mean().item())
        del x, past
print(scores)
