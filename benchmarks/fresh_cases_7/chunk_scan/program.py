"""A state space model whose scan works in chunks (the fallback without a kernel)."""

import torch
from torch import nn


def segment_sum(x):
    size = x.shape[-1]
    x = x[..., None].expand(*x.shape, size)
    below = torch.ones(size, size, device=x.device, dtype=torch.bool).tril(-1)
    total = x.masked_fill(~below, 0).cumsum(-2)
    keep = torch.ones(size, size, device=x.device, dtype=torch.bool).tril()
    return total.masked_fill(~keep, -torch.inf)


class Mixer(nn.Module):
    def __init__(self, width=128, heads=4, state=64, chunk=64):
        super().__init__()
        self.heads, self.state, self.chunk = heads, state, chunk
        self.in_proj = nn.Linear(width, width + 2 * heads * state + heads)
        self.out_proj = nn.Linear(width, width)
        self.A = nn.Parameter(torch.rand(heads))

    def forward(self, x):
        batch, length, width = x.shape
        sizes = [width, self.heads * self.state, self.heads * self.state, self.heads]
        u, b, c, dt = self.in_proj(x).split(sizes, -1)
        shape = (batch, length // self.chunk, self.chunk, self.heads, -1)
        u, b, c = u.reshape(shape), b.reshape(shape), c.reshape(shape)
        decay = (-dt.sigmoid() * self.A).reshape(*shape[:-1]).permute(0, 3, 1, 2)

        G_intermediate = c[:, :, :, None, :, :] * b[:, :, None, :, :, :]
        G = G_intermediate.sum(dim=-1)

        L = torch.exp(segment_sum(decay)).permute(0, 2, 3, 4, 1)
        M = G * L
        y = torch.einsum("bcijh,bcjhd->bcihd", M, u)
        return self.out_proj(y.reshape(batch, length, width))


class Mamba(nn.Module):
    def __init__(self, vocabulary=2000, width=128, layers=3):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(Mixer(width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, vocabulary)

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + layer(x)
        return self.lm_head(self.norm(x[:, -1]))


@torch.inference_mode()
def generate(model, prompt, new=3):
    tokens = prompt
    for _ in range(new):
        window = tokens[:, -prompt.shape[1] :]
        tokens = torch.cat([tokens, model(window).argmax(-1, keepdim=True)], 1)
    return tokens[:, prompt.shape[1] :]


if __name__ == "__main__":
    torch.manual_seed(0)
    print(generate(Mamba().cuda().eval(), torch.randint(0, 2000, (4, 512)).cuda()).tolist())
