"""A training step of the language model of Stanford's CS336, for the rows of its students.

Written after the course's layers: products by ``einsum``, norms in float32, attention by products
with an own softmax, weights in float32 under autocast to bfloat16. The host waits after the forward
pass, the backward pass and the optimizer, or, with ``--waits steps``, only at the end.
``--rotary indexed``: as the course had it in 2025.
``--optimizer course``: its AdamW, one operator after another; ``none``: the row has no optimizer.
"""

from __future__ import annotations

import argparse
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


class Linear(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.einsum("...i,oi->...o", x, self.weight)


class Norm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
        return (self.weight * wide).to(x.dtype)


def softmax(x: torch.Tensor) -> torch.Tensor:
    powers = torch.exp(x - torch.max(x, dim=-1, keepdim=True)[0])
    return powers / torch.sum(powers, dim=-1, keepdim=True)


def cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    low = logits - torch.max(logits, dim=-1, keepdim=True)[0]
    low = low - torch.log(torch.sum(torch.exp(low), dim=-1, keepdim=True))
    return torch.mean(torch.gather(-low, -1, labels.unsqueeze(-1)))


class Block(nn.Module):
    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__()
        width, self.heads = options.width, options.heads
        self.indexed = options.rotary == "indexed"
        self.norm_1, self.norm_2 = Norm(width), Norm(width)
        self.query, self.key, self.value, self.out = (Linear(width, width) for _ in range(4))
        self.gate, self.up = (Linear(width, options.mlp) for _ in range(2))
        self.down = Linear(options.mlp, width)

    def forward(self, x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm_1(x), turns)
        y = self.norm_2(x)
        gate = self.gate(y)
        return x + self.down(gate * torch.sigmoid(gate) * self.up(y))

    def attention(self, x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        query, key, value = (
            each(x).view(batch, length, self.heads, -1).transpose(1, 2)
            for each in (self.query, self.key, self.value)
        )
        query, key = self.turned(query, turns), self.turned(key, turns)
        places = torch.arange(length, device=x.device)
        mask = (places[:, None] >= places[None, :])[None, None]
        scores = torch.einsum("bhqd,bhkd->bhqk", query, key) / math.sqrt(width // self.heads)
        weights = softmax(torch.where(mask, scores, float("-inf")))
        y = torch.einsum("bhqk,bhkd->bhqd", weights, value)
        return self.out(y.transpose(1, 2).contiguous().view(batch, length, width))

    def turned(self, x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
        length = x.shape[-2]
        first, second = x.unflatten(-1, (-1, 2)).unbind(-1)
        if self.indexed:
            places = torch.arange(length, device=x.device)[None, None]
            cos, sin = turns[:, places].unbind(0)
        else:
            cos, sin = turns[:, :length].unbind(0)
        parts = cos * first - sin * second, sin * first + cos * second
        return torch.stack(parts, dim=-1).flatten(-2) if self.indexed else torch.cat(parts, dim=-1)


class Model(nn.Module):
    turns: torch.Tensor

    def __init__(self, options: argparse.Namespace, length: int, layers: int) -> None:
        super().__init__()
        size = options.width // options.heads
        rates = 10000.0 ** (-torch.arange(0, size, 2) / size)
        angles = torch.outer(torch.arange(length).float(), rates)
        self.register_buffer("turns", torch.stack((angles.cos(), angles.sin())), persistent=False)
        self.words = nn.Parameter(torch.empty(options.vocabulary, options.width))
        self.blocks = nn.ModuleList([Block(options) for _ in range(layers)])
        self.norm = Norm(options.width)
        self.head = Linear(options.width, options.vocabulary)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.words[ids, :]
        for block in self.blocks:
            x = block(x, self.turns)
        return self.head(self.norm(x))


class CourseAdamW(torch.optim.Optimizer):
    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 1e-3})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                grad, state, rate = parameter.grad.data, self.state[parameter], group["lr"]
                count = state.get("t", 1)
                parameter.data -= rate * 0.01 * parameter.data
                mean = state.get("m", torch.zeros_like(grad))
                square = state.get("v", torch.zeros_like(grad))
                mean = 0.9 * mean + 0.1 * grad
                square = 0.999 * square + 0.001 * torch.square(grad)
                parameter.data -= rate * mean / (torch.sqrt(square) + 1e-8)
                state.update(m=mean, v=square, t=count + 1)


def main() -> None:
    parser = argparse.ArgumentParser()
    for name, size in (("width", 768), ("heads", 12), ("mlp", 3072), ("vocabulary", 10000)):
        parser.add_argument(f"--{name}", type=int, default=size)
    parser.add_argument("--rotary", choices=("sliced", "indexed"), default="sliced")
    parser.add_argument("--loss", choices=("course", "torch"), default="course")
    parser.add_argument("--optimizer", choices=("none", "course", "torch"), default="none")
    parser.add_argument("--waits", choices=("passes", "steps"), default="passes")
    parser.add_argument("--runs", default="512x4x12", help="sequence, micro-batch, layers")
    parser.add_argument("--accumulation", default="1,1")
    options = parser.parse_args()
    for run in options.runs.split(","):
        train(options, *map(int, run.split("x")))


def train(options: argparse.Namespace, length: int, batch: int, layers: int) -> None:
    with torch.device("meta"):
        model = Model(options, length, layers)
    model = model.to_empty(device="cuda")
    ids, labels = (
        torch.randint(options.vocabulary, (batch, length), device="cuda") for _ in range(2)
    )
    nothing = [torch.zeros(1, device="cuda", requires_grad=True)]
    optimizer: torch.optim.Optimizer = torch.optim.SGD(nothing, lr=0.1)
    if options.optimizer == "course":
        optimizer = CourseAdamW(model.parameters())
    if options.optimizer == "torch":
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    each = options.waits == "passes"
    for _ in options.accumulation.split(","):
        with torch.autocast("cuda", torch.bfloat16):
            logits = model(ids)
            if each:
                torch.cuda.synchronize()
            if options.loss == "course":
                loss = cross_entropy(logits, labels)
            else:
                loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        loss.backward()
        if each:
            torch.cuda.synchronize()
        optimizer.step()
        torch.cuda.synchronize()
        model.zero_grad(set_to_none=True)


if __name__ == "__main__":
    main()
