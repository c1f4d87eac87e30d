"""Perplexity of a text, window after window."""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn


class ModelOutput(NamedTuple):
    logits: torch.Tensor
    past_key_values: list | None = None


class Attention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.o_proj = nn.Linear(width, width, bias=False)

    def forward(self, x, past):
        q, k, v = (
            part.unflatten(2, (self.heads, -1)).transpose(1, 2)
            for part in self.qkv(x).chunk(3, dim=2)
        )
        if past is not None:
            k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=past is None)
        return self.o_proj(out.transpose(1, 2).flatten(2)), (k.contiguous(), v.contiguous())


class Llama(nn.Module):
    def __init__(self, vocabulary=4000, width=384, heads=6, layers=10):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.attention = nn.ModuleList(Attention(width, heads) for _ in range(layers))
        self.mlp = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.lm_head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids, past_key_values=None, use_cache=True):
        x = self.embed(ids)
        present = [] if use_cache else None
        for number, (attention, mlp) in enumerate(zip(self.attention, self.mlp, strict=True)):
            past = None if past_key_values is None else past_key_values[number]
            attended, cache = attention(x, past)
            x = x + attended
            x = x + F.silu(mlp(x))
            if use_cache:
                present.append(cache)
        return ModelOutput(self.lm_head(x), present)


class PerplexityEvaluator:
    def __init__(self, model, window=512, rows=2):
        self.model, self.window, self.rows = model, window, rows

    @torch.no_grad()
    def calculate(self, tokens):
        total, count = 0.0, 0
        for ids in tokens.view(-1, self.rows, self.window):
            ids = ids.cuda()
            prediction = self.model(ids)
            nll = F.cross_entropy(prediction.logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
            total, count = total + nll.item(), count + 1
        return math.exp(total / count)


if __name__ == "__main__":
    torch.manual_seed(0)
    text = torch.randint(0, 4000, (5 * 2 * 512,))
    print(PerplexityEvaluator(Llama().cuda().eval()).calculate(text))
