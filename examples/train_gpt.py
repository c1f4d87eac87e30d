"""Train a small GPT on characters, in plain PyTorch.

Runs on a CUDA device if there is one, else on the CPU. Nothing here knows of gpuprobe:

    python examples/train_gpt.py
    gpuprobe run examples/train_gpt.py

Losses are printed with every digit, so that two runs under one seed can be compared.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

TEXT = Path(__file__).parent / "data" / "harbour_log.txt"
HEAD_SIZE = 32


class Attention(nn.Module):
    """Causal self-attention over a sequence: (batch, time, embed) -> the same shape."""

    def __init__(self, embed: int) -> None:
        super().__init__()
        self.heads = max(1, embed // HEAD_SIZE)
        self.qkv = nn.Linear(embed, 3 * embed)
        self.out = nn.Linear(embed, embed)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, time, embed = x.shape
        qkv = self.qkv(x).view(batch, time, 3, self.heads, embed // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, time, embed))


class Block(nn.Module):
    """One layer: attention, then a two-layer MLP, each added to what came in."""

    def __init__(self, embed: int) -> None:
        super().__init__()
        self.norm_attention = nn.LayerNorm(embed)
        self.attention = Attention(embed)
        self.norm_mlp = nn.LayerNorm(embed)
        self.mlp = nn.Sequential(
            nn.Linear(embed, 4 * embed), nn.GELU(), nn.Linear(4 * embed, embed)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm_attention(x))
        return x + self.mlp(self.norm_mlp(x))


class GPT(nn.Module):
    """Token ids (batch, time) -> logits (batch, time, vocabulary)."""

    def __init__(self, vocabulary: int, layers: int, embed: int, context: int) -> None:
        super().__init__()
        self.token_embedding = nn.Embedding(vocabulary, embed)
        self.position_embedding = nn.Embedding(context, embed)
        self.blocks = nn.ModuleList(Block(embed) for _ in range(layers))
        self.norm = nn.LayerNorm(embed)
        self.head = nn.Linear(embed, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.token_embedding(tokens) + self.position_embedding(positions)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Batches:
    """Random windows of a text, as (inputs, targets) of shape (batch, context)."""

    def __init__(self, text: str, batch_size: int, context: int, seed: int) -> None:
        letters = sorted(set(text))
        number = {letter: i for i, letter in enumerate(letters)}
        self.vocabulary = len(letters)
        self.tokens = torch.tensor([number[letter] for letter in text])
        self.batch_size = batch_size
        self.context = context
        self.generator = torch.Generator().manual_seed(seed)

    def next(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        last = len(self.tokens) - self.context - 1
        starts = torch.randint(last, (self.batch_size, 1), generator=self.generator)
        window = self.tokens[starts + torch.arange(self.context + 1)]
        window = window.to(device)
        return window[:, :-1], window[:, 1:]


def train(args: argparse.Namespace) -> None:
    torch.manual_seed(args.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    batches = Batches(TEXT.read_text(encoding="utf-8"), args.batch_size, args.context, args.seed)
    model = GPT(batches.vocabulary, args.layers, args.embed, args.context).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate)

    # Half precision on CUDA needs its losses scaled; bfloat16 on the CPU does not.
    low_precision = torch.float16 if device.type == "cuda" else torch.bfloat16
    scaler = torch.amp.GradScaler(device.type, enabled=args.amp and device.type == "cuda")

    parameters = sum(p.numel() for p in model.parameters())
    print(f"device {device.type}, {parameters} parameters, {batches.vocabulary} characters")
    for step in range(args.steps):
        total = 0.0
        for _ in range(args.accumulate):
            inputs, targets = batches.next(device)
            with torch.autocast(device.type, dtype=low_precision, enabled=args.amp):
                logits = model(inputs)
                loss = functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
            scaler.scale(loss / args.accumulate).backward()
            total += loss.item() / args.accumulate
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        print(f"step {step} loss {total!r}", flush=True)


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("must be 1 or more")
    return number


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small GPT on characters.")
    parser.add_argument("--steps", type=positive, default=20, help="optimizer steps")
    parser.add_argument("--batch-size", type=positive, default=16)
    parser.add_argument("--layers", type=positive, default=4)
    parser.add_argument("--embed", type=positive, default=128, help=f"a multiple of {HEAD_SIZE}")
    parser.add_argument("--context", type=positive, default=64, help="characters seen at once")
    parser.add_argument("--accumulate", type=positive, default=1, help="batches per step")
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--amp", action="store_true", help="train in mixed precision")
    parser.add_argument("--seed", type=int, default=1337)
    args = parser.parse_args()
    if args.embed % HEAD_SIZE:
        parser.error(f"--embed must be a multiple of {HEAD_SIZE}")
    train(args)


if __name__ == "__main__":
    main()
