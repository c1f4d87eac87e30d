"""A training step of BERT for question answering, for lambdal's rows in the truths.

Plain torch in place of NVIDIA's DeepLearningExamples with Apex, whose level O2 this is: weights and
gradients in float16, float32 masters that a fused Adam updates, a dynamic loss scale whose check
for overflows the host waits for, gradients clipped, layer normalisation in one kernel, attention by
matrix products with dropout on its probabilities. Several GPUs: all-reduce of float16 gradients in
buckets, during the backward pass.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

VOCABULARY, DROPOUT = 30522, 0.1


class Layer(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x = self.norm_1(x + F.dropout(self.out(self.attention(x, mask)), DROPOUT))
        y = self.down(F.gelu(self.up(x)))
        return self.norm_2(x + F.dropout(y, DROPOUT))

    def attention(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        size = width // self.heads
        query, key, value = (
            each(x).view(batch, length, self.heads, size).transpose(1, 2)
            for each in (self.query, self.key, self.value)
        )
        scores = torch.matmul(query, key.transpose(-1, -2)) / size**0.5
        shares = F.dropout(F.softmax(scores + mask, dim=-1), DROPOUT)
        return torch.matmul(shares, value).transpose(1, 2).reshape(batch, length, width)


class Bert(nn.Module):
    def __init__(self, layers: int, width: int, heads: int) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, width)
        self.positions, self.kinds = nn.Embedding(512, width), nn.Embedding(2, width)
        self.norm = nn.LayerNorm(width)
        self.layers = nn.ModuleList([Layer(width, heads) for _ in range(layers)])
        self.answer = nn.Linear(width, 2)

    def forward(
        self, ids: torch.Tensor, kinds: torch.Tensor, mask: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        places = torch.arange(ids.shape[1], device=ids.device).unsqueeze(0).expand_as(ids)
        x = self.words(ids) + self.positions(places) + self.kinds(kinds)
        x = F.dropout(self.norm(x), DROPOUT)
        wide = (1.0 - mask.to(x.dtype)[:, None, None, :]) * -10000.0
        for layer in self.layers:
            x = layer(x, wide)
        start, end = self.answer(x).split(1, dim=-1)
        return start.squeeze(-1), end.squeeze(-1)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--runs", default="384x32x12", help="sequence, micro-batch, layers")
    parser.add_argument("--accumulation", default="1,1")
    options = parser.parse_args()
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        dist.init_process_group("nccl")
    for run in options.runs.split(","):
        sequence, batch, layers = map(int, run.split("x"))
        model = Bert(layers, options.width, options.heads).cuda().half()
        train(model, (batch, sequence), options.accumulation.count(",") + 1)


def train(model: nn.Module, size: tuple[int, int], steps: int) -> None:
    parameters = list(model.parameters())
    masters = [each.detach().float() for each in parameters]
    if dist.is_initialized():
        model = DistributedDataParallel(model)
    optimizer = torch.optim.Adam(masters, lr=3e-5, fused=True)
    scale = torch.full((), 65536.0, device="cuda")
    model.train()
    for _ in range(steps):
        ids, kinds, mask = (torch.randint(2, size).cuda() for _ in range(3))
        starts, ends = (torch.randint(size[1], size[:1]).cuda() for _ in range(2))
        first, last = model(ids, kinds, mask)
        loss = (F.cross_entropy(first.float(), starts) + F.cross_entropy(last.float(), ends)) / 2
        (loss * scale).backward()
        for master in masters:
            master.grad = torch.empty_like(master) if master.grad is None else master.grad
        wide = [master.grad for master in masters]
        torch._foreach_copy_(wide, [each.grad for each in parameters])
        overflow = torch.zeros((), device="cuda")
        torch._amp_foreach_non_finite_check_and_unscale_(wide, overflow, 1 / scale)
        if overflow.item():
            continue
        nn.utils.clip_grad_norm_(masters, 1.0)
        optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(parameters, masters)
        for parameter in parameters:
            parameter.grad = None


if __name__ == "__main__":
    main()
