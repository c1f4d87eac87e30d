"""A training step of Llama 3.2 1B, for the rows of cudnn-frontend in the truths.

Plain torch in place of transformers' modelling code, with its operators: RMS norms in float32,
rotary embeddings by halves, keys and values repeated for all heads, weights in bfloat16, logits not
converted. Input is hidden states, the output layer has the embedding's weight, SGD without
momentum; nothing waits for the GPU. ``--attention``: the backend that the script selects.
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

BACKENDS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
}


class Norm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
        return self.weight * wide.to(x.dtype)


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class Block(nn.Module):
    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__()
        width, self.heads, self.key_heads = options.width, options.heads, options.key_heads
        size = width // self.heads
        self.norm_1, self.norm_2 = Norm(width), Norm(width)
        self.query, self.out = (nn.Linear(width, width, bias=False) for _ in range(2))
        self.key, self.value = (
            nn.Linear(width, size * self.key_heads, bias=False) for _ in range(2)
        )
        self.gate, self.up = (nn.Linear(width, options.mlp, bias=False) for _ in range(2))
        self.down = nn.Linear(options.mlp, width, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm_1(x), cos, sin)
        y = self.norm_2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))

    def attention(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        query, key, value = (
            each(x).view(batch, length, -1, width // self.heads).transpose(1, 2)
            for each in (self.query, self.key, self.value)
        )
        query, key = rotated(query, cos, sin), rotated(key, cos, sin)
        key, value = (self.repeated(each) for each in (key, value))
        y = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(y.transpose(1, 2).contiguous().view(batch, length, width))

    def repeated(self, x: torch.Tensor) -> torch.Tensor:
        batch, heads, length, size = x.shape
        times = self.heads // heads
        wide = x[:, :, None].expand(batch, heads, times, length, size)
        return wide.reshape(batch, heads * times, length, size)


class Llama(nn.Module):
    def __init__(self, options: argparse.Namespace, layers: int) -> None:
        super().__init__()
        self.size = options.width // options.heads
        self.blocks = nn.ModuleList([Block(options) for _ in range(layers)])
        self.norm = Norm(options.width)
        self.head = nn.Linear(options.width, options.vocabulary, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        turns = 1 / 500000 ** (torch.arange(0, self.size, 2, device=x.device).float() / self.size)
        angles = torch.outer(torch.arange(x.shape[1], device=x.device).float(), turns)
        angles = torch.cat((angles, angles), dim=-1)
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        for block in self.blocks:
            x = block(x, cos, sin)
        return self.head(self.norm(x))


def main() -> None:
    parser = argparse.ArgumentParser()
    sizes = {"width": 2048, "heads": 32, "key_heads": 8, "mlp": 8192, "vocabulary": 128256}
    for name, size in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=size)
    parser.add_argument("--attention", choices=BACKENDS, required=True)
    parser.add_argument("--runs", default="2048x6x16", help="sequence, micro-batch, layers")
    parser.add_argument("--accumulation", default="1,1")
    options = parser.parse_args()
    for run in options.runs.split(","):
        length, batch, layers = map(int, run.split("x"))
        with torch.device("cuda"):
            model = Llama(options, layers).bfloat16()
            states = torch.randn(batch, length, options.width, dtype=torch.bfloat16)
            labels = torch.randint(options.vocabulary, (batch, length))
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
        for _ in options.accumulation.split(","):
            with sdpa_kernel(BACKENDS[options.attention]):
                logits = model(states)
                loss = F.cross_entropy(logits.view(-1, logits.shape[-1]), labels.view(-1))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()


if __name__ == "__main__":
    main()
