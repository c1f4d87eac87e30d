import functools
import random

import torch
from torch import nn


@functools.lru_cache(maxsize=None)
def causal_bias(length):
    full = torch.full((length, length), float("-inf"), device="cuda")
    return full.triu(1)


class Attention(nn.Module):
    def __init__(self, width=256):
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        scores = q @ k.transpose(1, 2) / 16 + causal_bias(x.shape[1])
        return scores.softmax(-1) @ v


random.seed(3)
model = Attention().cuda()
with torch.no_grad():
    for request in range(40):
        length = random.randrange(600, 2000)
        out = model(torch.randn(1, length, 256, device="cuda"))
print(out.shape)
