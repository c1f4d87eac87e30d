"""A training step of GPT-2 small, compiled, for the rows of gpt-3-small in the truths.

Written after the scripts' description, not their code: learned positions, biases, residual branches
scaled, weights in float32 under autocast to bfloat16, `scaled_dot_product_attention` (torch 2.8:
FlashAttention-2), fused AdamW in two groups, gradients clipped, batches copied from pageable
memory, the host waits at the end of a step. Several GPUs: DistributedDataParallel around the
compiled model. ``--masked``: losses of padding are left out, after a check of the last hidden state
by the host, which splits the graph.
"""

from __future__ import annotations

import argparse
import contextlib
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.parallel import DistributedDataParallel

PADDING = 50257


class Block(nn.Module):
    def __init__(self, width: int, heads: int, layers: int) -> None:
        super().__init__()
        self.heads, self.scale = heads, (2 * layers) ** -0.5
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.scale * self.attention(self.norm_1(x))
        return x + self.scale * self.down(F.gelu(self.up(self.norm_2(x))))

    def attention(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        parts = self.qkv(x).split(width, dim=2)
        heads = (each.view(batch, length, self.heads, -1).transpose(1, 2) for each in parts)
        y = F.scaled_dot_product_attention(*heads, is_causal=True)
        return self.out(y.transpose(1, 2).contiguous().view(batch, length, width))


class Gpt(nn.Module):
    def __init__(self, options: argparse.Namespace, length: int, layers: int) -> None:
        super().__init__()
        width, self.masked = options.width, options.masked
        self.tokens = nn.Embedding(options.vocabulary, width)
        self.positions = nn.Embedding(length, width)
        self.blocks = nn.ModuleList([Block(width, options.heads, layers) for _ in range(layers)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, options.vocabulary, bias=False)
        self.tokens.weight = self.head.weight

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.size(1), device=ids.device))
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        if self.masked and torch.isnan(x).any():
            raise ValueError("not a number")
        logits = self.head(x)
        logits, labels = logits.view(-1, logits.size(-1)), labels.reshape(-1)
        if not self.masked:
            return F.cross_entropy(logits, labels)
        counted = labels != PADDING
        losses = F.cross_entropy(logits, labels, reduction="none")
        return (losses * counted).sum() / counted.sum()


def main() -> None:
    parser = argparse.ArgumentParser()
    for name, size in (("width", 768), ("heads", 12), ("vocabulary", 50304)):
        parser.add_argument(f"--{name}", type=int, default=size)
    parser.add_argument("--masked", action="store_true")
    parser.add_argument("--runs", default="1024x8x12", help="sequence, micro-batch, layers")
    parser.add_argument("--accumulation", default="1,1,2")
    options = parser.parse_args()
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    torch.set_float32_matmul_precision("high")
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        dist.init_process_group("nccl")
    for run in options.runs.split(","):
        torch._dynamo.reset()
        train(options, *map(int, run.split("x")))


def train(options: argparse.Namespace, length: int, batch: int, layers: int) -> None:
    plain = Gpt(options, length, layers).cuda()
    model: nn.Module = torch.compile(plain)
    several = dist.is_initialized()
    if several:
        model = DistributedDataParallel(model)
    groups = [
        {"params": [each for each in plain.parameters() if each.dim() >= 2], "weight_decay": 0.1},
        {"params": [each for each in plain.parameters() if each.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=6e-4, betas=(0.9, 0.95), fused=True)
    for count in map(int, options.accumulation.split(",")):
        optimizer.zero_grad()
        total = torch.zeros((), device="cuda")
        for number in range(count):
            ids, labels = (torch.randint(options.vocabulary, (batch, length)) for _ in range(2))
            last = number == count - 1
            with model.no_sync() if several and not last else contextlib.nullcontext():
                with (
                    torch.autocast("cuda", torch.bfloat16),
                    sdpa_kernel(SDPBackend.FLASH_ATTENTION),
                ):
                    loss = model(ids.cuda(), labels.cuda())
                loss = loss / count
                total += loss.detach()
                loss.backward()
        if several:
            dist.all_reduce(total, op=dist.ReduceOp.AVG)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
