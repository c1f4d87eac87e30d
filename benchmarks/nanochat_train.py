"""The base training of nanochat, as its speedrun of October 2025 ran it, for `nanochat_peak.py`.

    torchrun --nproc_per_node 8 benchmarks/nanochat_train.py [--depth 20] [--batch 32] [--steps 3]

Rewritten from the architecture: a decoder with rotary positions, normalised queries and keys,
squared ReLUs, untied embeddings in bfloat16 and capped logits, compiled, under autocast; matrices
are optimized by Muon and embeddings by AdamW, both sharded by ranks and sending asynchronously;
gradients are clipped, and the loss is evaluated before the first step. Tokens are random. Source:
karpathy/nanochat (MIT) at dd6ff9a, ``scripts/base_train.py`` and what it imports.
"""

from __future__ import annotations

import argparse
import os

os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

LENGTH, VOCABULARY, HEAD = 2048, 65536, 128
ROTATED = 10 * LENGTH
CAP = 15


def normed(x: Tensor) -> Tensor:
    return F.rms_norm(x, (x.size(-1),))


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    left, right = x.chunk(2, dim=3)
    return torch.cat([left * cos + right * sin, left * -sin + right * cos], 3).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, width, bias=False)
        self.value = nn.Linear(width, width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        shape = (x.size(0), x.size(1), -1, HEAD)
        query, key, value = (part(x).view(shape) for part in (self.query, self.key, self.value))
        query, key = turned(query, cos, sin), turned(key, cos, sin)
        query, key = normed(query), normed(key)
        query, key, value = (part.transpose(1, 2) for part in (query, key, value))
        found = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        found = found.transpose(1, 2).contiguous().view(x.shape)
        result: Tensor = self.out(found)
        return result


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention = Attention(width)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(normed(x), cos, sin)
        result: Tensor = x + self.down(F.relu(self.up(normed(x))).square())
        return result


class Decoder(nn.Module):
    def __init__(self, depth: int) -> None:
        super().__init__()
        width = 64 * depth
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        cos, sin = self.angles()
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        self.embedding.to(torch.bfloat16)

    def angles(self) -> tuple[Tensor, Tensor]:
        device = self.embedding.weight.device
        steps = torch.arange(0, HEAD, 2, dtype=torch.float32, device=device) / HEAD
        at = torch.arange(ROTATED, dtype=torch.float32, device=device)
        angles = torch.outer(at, 10000.0**-steps)
        cos, sin = angles.cos().bfloat16(), angles.sin().bfloat16()
        return cos[None, :, None, :], sin[None, :, None, :]

    def begin(self) -> None:
        for weight in self.parameters():
            nn.init.normal_(weight, std=0.02)
        self.cos, self.sin = self.angles()

    def forward(self, tokens: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
        cos, sin = self.cos[:, : tokens.size(1)], self.sin[:, : tokens.size(1)]
        x = normed(self.embedding(tokens))
        for block in self.blocks:
            x = block(x, cos, sin)
        logits = self.head(normed(x))
        logits = (CAP * torch.tanh(logits / CAP)).float()
        return F.cross_entropy(
            logits.view(-1, VOCABULARY), targets.view(-1), ignore_index=-1, reduction=reduction
        )


@torch.compile
def orthogonal(gradient: Tensor) -> Tensor:
    """Newton and Schulz's iteration, five times."""
    x = gradient.bfloat16()
    tall = gradient.size(0) > gradient.size(1)
    x = x.mT if tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        square = x @ x.mT
        x = 3.4445 * x + (-4.775 * square + 2.0315 * square @ square) @ x
    return x.mT if tall else x


class Muon(torch.optim.Optimizer):
    """Each rank has the momentum of every so-many-th matrix, and sends it when it is updated."""

    def __init__(self, weights: Iterator[nn.Parameter]) -> None:
        weights_of: dict[torch.Size, list[nn.Parameter]] = {}
        for weight in weights:
            weights_of.setdefault(weight.shape, []).append(weight)
        groups = [
            {"params": found, "padding": torch.zeros_like(found[0])}
            for _, found in sorted(weights_of.items())
        ]
        super().__init__(groups, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        rank, ranks = dist.get_rank(), dist.get_world_size()
        chunks = [
            (group["params"][at : at + ranks], group["padding"])
            for group in self.param_groups
            for at in range(0, len(group["params"]), ranks)
        ]
        sent = []
        for weights, padding in chunks:
            parts = [weight.grad for weight in weights] + [padding] * (ranks - len(weights))
            mine = weights[rank].grad if rank < len(weights) else torch.empty_like(padding)
            work = dist.reduce_scatter(mine, parts, op=dist.ReduceOp.AVG, async_op=True)
            sent.append(work.get_future())
        gathered = []
        for (weights, padding), future in zip(chunks, sent, strict=True):
            future.wait()
            own = padding
            if rank < len(weights):
                own = weights[rank]
                state = self.state[own]
                if not state:
                    state["momentum"] = torch.zeros_like(own)
                momentum = state["momentum"].lerp_(own.grad, 0.05)
                update = orthogonal(own.grad.lerp_(momentum, 0.95))
                own.add_(update, alpha=-0.02 * max(1.0, own.size(0) / own.size(1)) ** 0.5)
            missing = ranks - len(weights)
            parts = [*weights, *(torch.empty_like(padding) for _ in range(missing))]
            gathered.append(dist.all_gather(parts, own, async_op=True).get_future())
        torch.futures.collect_all(gathered).wait()


class AdamW(torch.optim.Optimizer):
    """Each rank has the moments of its rows."""

    def __init__(self, weights: list[nn.Parameter]) -> None:
        super().__init__(weights, {"betas": (0.8, 0.95)})

    @torch.compile
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        rank, ranks = dist.get_rank(), dist.get_world_size()
        weights = [weight for group in self.param_groups for weight in group["params"]]
        sent, parts = [], []
        for weight in weights:
            part = torch.empty_like(weight.grad[: weight.shape[0] // ranks])
            work = dist.reduce_scatter_tensor(
                part, weight.grad, op=dist.ReduceOp.AVG, async_op=True
            )
            sent.append(work.get_future())
            parts.append(part)
        gathered = []
        for weight, part, future in zip(weights, parts, sent, strict=True):
            future.wait()
            rows = part.shape[0]
            mine = weight[rank * rows : (rank + 1) * rows]
            state = self.state[weight]
            if not state:
                state["step"] = torch.tensor(0, dtype=torch.int64, device=weight.device)
                state["mean"], state["square"] = torch.zeros_like(mine), torch.zeros_like(mine)
            state["step"] += 1
            mean = state["mean"].mul_(0.8).add_(part, alpha=0.2)
            square = state["square"].mul_(0.95).addcmul_(part, part, value=0.05)
            rate = 0.004 * torch.sqrt(1 - 0.95 ** state["step"]) / (1 - 0.8 ** state["step"])
            mine.add_(mean.div(square.sqrt().add_(1e-10)).mul_(rate), alpha=-1.0)
            work = dist.all_gather_into_tensor(weight, mine, async_op=True)
            gathered.append(work.get_future())
        torch.futures.collect_all(gathered).wait()


def batches(size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """As the loader of the run does, the generator keeps the last batch."""
    shape = (size, LENGTH)
    while True:
        tokens = torch.randint(VOCABULARY, (size * LENGTH + 1,)).pin_memory()
        inputs = tokens[:-1].to(torch.int32).view(shape).to("cuda", non_blocking=True)
        targets = tokens[1:].view(shape).to("cuda", non_blocking=True)
        yield inputs, targets


def evaluate(model: Any, loader: Iterator[tuple[Tensor, Tensor]], lengths: Tensor) -> None:
    """Bits per byte."""
    inputs, targets = next(loader)
    with torch.no_grad():
        losses = model(inputs, targets, "none").view(-1)
        (losses * (lengths[targets.view(-1)] > 0)).sum()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--depth", type=int, default=20)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--steps", type=int, default=3)
    args = parser.parse_args()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    torch.set_float32_matmul_precision("high")
    dist.init_process_group("nccl", device_id=device)
    lengths = torch.ones(VOCABULARY, dtype=torch.int32, device=device)
    with torch.device("meta"):
        decoder = Decoder(args.depth)
    decoder.to_empty(device=device)
    decoder.begin()
    model: Any = torch.compile(decoder, dynamic=False)
    adamw = AdamW([decoder.head.weight, decoder.embedding.weight])
    muon = Muon(decoder.blocks.parameters())
    loader, held_out = batches(args.batch), batches(args.batch)
    inputs, targets = next(loader)
    with torch.autocast("cuda", torch.bfloat16):
        evaluate(model, held_out, lengths)
    for step in range(args.steps):
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(inputs, targets)
        loss.backward()
        inputs, targets = next(loader)
        nn.utils.clip_grad_norm_(decoder.parameters(), 1.0)
        adamw.step()
        muon.step()
        decoder.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        print(f"step {step}: {torch.cuda.max_memory_allocated() / 2**20:.2f} MiB", flush=True)


if __name__ == "__main__":
    main()
