"""A language model without positions, whose attention has linear biases."""

import math

import torch
import torch.nn.functional as F
from torch import nn


class AliBi(nn.Module):
    def __init__(self, heads):
        super().__init__()
        self.heads = heads
        self.cached_matrix, self.cached_seq_len = None, 0
        slopes = torch.tensor([2 ** (-8 * (head + 1) / heads) for head in range(heads)])
        self.register_buffer("slopes", slopes)

    def matrix(self, seq_len):
        if self.cached_seq_len < seq_len:
            size = 2 ** math.ceil(math.log2(seq_len))
            distances = torch.arange(size, device=self.slopes.device)
            distances = (distances[None] - distances[:, None]).tril()
            self.cached_matrix = None
            self.cached_matrix = self.slopes[:, None, None] * distances
            self.cached_seq_len = size
        return self.cached_matrix[:, :seq_len, :seq_len]

    def forward(self, scores):
        return scores.add_(self.matrix(scores.shape[-1]))


class Block(nn.Module):
    def __init__(self, width, heads, alibi):
        super().__init__()
        self.heads, self.alibi = heads, alibi
        self.qkv = nn.Linear(width, 3 * width)
        self.dense = nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU())
        self.down = nn.Linear(4 * width, width)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        weights = self.alibi(q @ k.transpose(2, 3)).softmax(-1)
        x = x + self.dense((weights @ v).transpose(1, 2).flatten(2))
        return x + self.down(self.mlp(x))


class NeoX(nn.Module):
    def __init__(self, words=1000, width=128, heads=8, layers=3):
        super().__init__()
        alibi = AliBi(heads)
        self.embed = nn.Embedding(words, width)
        self.blocks = nn.Sequential(*(Block(width, heads, alibi) for _ in range(layers)))

    def forward(self, ids):
        return self.blocks(self.embed(ids)) @ self.embed.weight.t()


@torch.inference_mode()
def score(model, texts):
    for ids in texts:
        ids = ids.cuda()
        yield F.cross_entropy(model(ids)[0, :-1], ids[0, 1:]).item()


if __name__ == "__main__":
    torch.manual_seed(0)
    texts = [torch.randint(0, 1000, (1, length)) for length in (256, 512, 1024, 1024, 512)]
    print(list(score(NeoX().cuda().eval(), texts)))
