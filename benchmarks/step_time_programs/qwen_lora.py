"""LoRA finetuning of Qwen, for Qwen's rows in the truths.

Plain torch in place of Qwen's modelling code, PEFT and Hugging Face's Trainer, with what they do by
``finetune.py --bf16 --gradient_checkpointing --use_lora``: weights and adapters in bfloat16 under
autocast, normalisation and rotary embedding in float32 by torch's own operators, FlashAttention-2,
each block computed again, losses checked by the host for each micro-batch, AdamW over lists,
gradients clipped. ``--embeddings``: embedding and output layer are trained too.
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

RANK, DROPOUT, SCALE = 64, 0.05, 16 / 64


class Adapted(nn.Module):
    """A frozen linear layer with a trained one of low rank beside it."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool = False) -> None:
        super().__init__()
        self.base = nn.Linear(inputs, outputs, bias=bias).requires_grad_(False)
        self.down = nn.Linear(inputs, RANK, bias=False)
        self.up = nn.Linear(RANK, outputs, bias=False)
        self.dropout = nn.Dropout(DROPOUT)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result = self.base(x)
        return result + self.up(self.down(self.dropout(x))) * SCALE


class Norm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return scaled.type_as(x) * self.weight


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    wide = x.float()
    first, second = wide.chunk(2, dim=-1)
    return (wide * cos + torch.cat((-second, first), dim=-1) * sin).type_as(x)


class Block(nn.Module):
    def __init__(self, width: int, heads: int, mlp: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = Norm(width), Norm(width)
        self.qkv, self.out = Adapted(width, 3 * width, bias=True), Adapted(width, width)
        self.gate, self.up, self.down = (
            Adapted(width, mlp),
            Adapted(width, mlp),
            Adapted(mlp, width),
        )

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        parts = self.qkv(self.norm_1(x)).split(width, dim=2)
        query, key, value = (each.view(batch, length, self.heads, -1) for each in parts)
        query, key = rotated(query, cos, sin), rotated(key, cos, sin)
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            y = F.scaled_dot_product_attention(
                *(each.transpose(1, 2) for each in (query, key, value)), is_causal=True
            )
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, width))
        y = self.norm_2(x)
        return x + self.down(self.up(y) * F.silu(self.gate(y)))


class Qwen(nn.Module):
    def __init__(self, vocabulary: int, width: int, heads: int, mlp: int, layers: int) -> None:
        super().__init__()
        self.heads = heads
        self.words = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList([Block(width, heads, mlp) for _ in range(layers)])
        self.norm = Norm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.words(ids)
        if not x.requires_grad:
            x.requires_grad_()
        size = x.shape[-1] // self.heads
        places = torch.arange(ids.shape[1], device=ids.device, dtype=torch.float32)
        angles = torch.outer(places, torch.rand(size // 2, device=ids.device))
        angles = torch.cat((angles, angles), dim=-1)[None, :, None, :]
        cos, sin = angles.cos(), angles.sin()
        for block in self.blocks:
            x = checkpoint(block, x, cos, sin, use_reentrant=True)
        logits = self.head(self.norm(x))[:, :-1].contiguous()
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), labels[:, 1:].reshape(-1))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--vocabulary", type=int, default=151936)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--mlp", type=int, default=5504)
    parser.add_argument("--embeddings", action="store_true")
    parser.add_argument("--runs", default="512x1x2", help="sequence, micro-batch, layers")
    parser.add_argument("--accumulation", default="1,1")
    options = parser.parse_args()
    for run in options.runs.split(","):
        sequence, batch, layers = map(int, run.split("x"))
        sizes = options.vocabulary, options.width, options.heads, options.mlp, layers
        with torch.device("cuda"):
            model = Qwen(*sizes).bfloat16()
        model.words.requires_grad_(options.embeddings)
        model.head.requires_grad_(options.embeddings)
        train(model, (batch, sequence), [int(each) for each in options.accumulation.split(",")])


def train(model: Qwen, size: tuple[int, int], accumulations: list[int]) -> None:
    trained = [each for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1)
    for micro_batches in accumulations:
        total = torch.zeros((), device="cuda")
        for _ in range(micro_batches):
            ids = torch.randint(10_000, size, dtype=torch.int).cuda()
            labels = torch.randint(10_000, size).cuda()
            with torch.autocast("cuda", torch.bfloat16):
                loss = model(ids, labels)
            loss = loss / micro_batches
            loss.backward()
            if torch.isnan(loss) or torch.isinf(loss):
                continue
            total += loss.detach()
        nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        total.item()


if __name__ == "__main__":
    main()
