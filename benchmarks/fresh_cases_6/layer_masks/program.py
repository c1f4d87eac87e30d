"""Look into the residual stream of a transformer with hooks (interpretability)."""

from dataclasses import dataclass

import torch
from torch import nn


@dataclass
class Settings:
    width: int = 256
    heads: int = 8
    layers: int = 8
    context: int = 4096
    vocabulary: int = 2000


class Attention(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.heads = cfg.heads
        self.qkv = nn.Linear(cfg.width, 3 * cfg.width)
        self.out = nn.Linear(cfg.width, cfg.width)
        self.pattern = nn.Identity()
        causal = torch.tril(torch.ones(cfg.context, cfg.context, dtype=torch.bool))
        self.register_buffer("mask", causal, persistent=False)

    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-1, -2) / (width // self.heads) ** 0.5
        scores = scores.masked_fill(~self.mask[:length, :length], float("-inf"))
        pattern = self.pattern(scores.softmax(-1))
        return self.out((pattern @ v).transpose(1, 2).reshape(batch, length, width))


class Layer(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(cfg.width), nn.LayerNorm(cfg.width)
        self.attention = Attention(cfg)
        self.mlp = nn.Sequential(
            nn.Linear(cfg.width, 2 * cfg.width), nn.GELU(), nn.Linear(2 * cfg.width, cfg.width)
        )

    def forward(self, x):
        x = x + self.attention(self.norm_1(x))
        return x + self.mlp(self.norm_2(x))


class HookedTransformer(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.embed = nn.Embedding(cfg.vocabulary, cfg.width)
        self.layers = nn.ModuleList(Layer(cfg) for _ in range(cfg.layers))
        self.unembed = nn.Linear(cfg.width, cfg.vocabulary)

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.unembed(x)

    def run_with_cache(self, tokens, wanted):
        cache, handles = {}, []
        for name, module in self.named_modules():
            if wanted(name):
                handles.append(module.register_forward_hook(keep(cache, name)))
        try:
            logits = self(tokens)
        finally:
            for handle in handles:
                handle.remove()
        return logits, cache


def keep(cache, name):
    def hook(module, args, output):
        cache[name] = output.mean((0, 1)).cpu()

    return hook


def induction_scores(cache):
    return {name: pattern.diagonal(offset=-1).mean().item() for name, pattern in cache.items()}


@torch.no_grad()
def main():
    torch.manual_seed(0)
    model = HookedTransformer(Settings()).cuda().eval()
    for _ in range(3):
        half = torch.randint(0, 2000, (2, 64), device="cuda")
        tokens = torch.cat([half, half], dim=1)
        logits, cache = model.run_with_cache(tokens, lambda name: name.endswith("pattern"))
        print(logits.shape, max(induction_scores(cache).values()))


if __name__ == "__main__":
    main()
