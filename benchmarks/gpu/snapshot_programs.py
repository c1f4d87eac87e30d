"""Programs that allocate as five public memory snapshots show it.

The snapshots (``lm_*.pickle``, see `NAMES`) were taken by others, of their language models on their
GPUs. They are not in this repository, and neither is the code that ran. What ran can
be read from the stacks and sizes of the allocations: the order of the operators, which results are
kept, the shapes. The two models here do the same operators in the same order; they were written
from the traces alone. Held against the snapshots' peaks they are a second truth, next to what
``record_truth.py`` records, of programs that no rule was made for.

Each program runs from the start of the process to the end of what was recorded. Parameters have
no values: none of the sizes depends on one, and 2.7 billion random numbers take a minute.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

__all__ = ["NAMES", "Program", "Sizes", "programs"]


@dataclass(frozen=True)
class Sizes:
    vocabulary: int
    context: int
    width: int
    depth: int
    heads: int
    hidden: int
    batch: int = 4

    def ids(self, device: str, *more: int) -> Tensor:
        return torch.randint(0, self.vocabulary, (*more, self.batch, self.context), device=device)


class Linear(nn.Module):
    def __init__(self, inside: int, out: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out, inside))

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("...i,oi->...o", x, self.weight)


class Embedding(nn.Module):
    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, width))

    def forward(self, ids: Tensor) -> Tensor:
        return self.weight[ids]


def softmax(x: Tensor) -> Tensor:
    shifted = x - torch.max(x, dim=-1, keepdim=True)[0]
    powers = torch.exp(shifted)
    return powers / torch.sum(powers, dim=-1, keepdim=True)


# -- the first model: ``lm_medium_*``


class NormA(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        dtype = x.dtype
        x = x.float()
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)
        x = x * scale
        return (self.weight * x).to(dtype)


class RotaryA(nn.Module):
    table: Tensor

    def __init__(self, context: int, size: int) -> None:
        super().__init__()
        speeds = 10000.0 ** (-torch.arange(0, size, 2) / size)
        angles = torch.outer(torch.arange(context).float(), speeds)
        self.register_buffer("table", torch.stack((angles.cos(), angles.sin())), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        first, second = x.unflatten(-1, (-1, 2)).movedim(-1, 0)
        cos, sin = self.table
        a = cos * first - sin * second
        b = sin * first + cos * second
        return torch.concat((a[..., None], b[..., None]), -1).flatten(-2)


class AttentionA(nn.Module):
    def __init__(self, sizes: Sizes, rotary: RotaryA) -> None:
        super().__init__()
        self.heads, self.rotary = sizes.heads, rotary
        self.q, self.k, self.v, self.o = (Linear(sizes.width, sizes.width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        q, k, v = self.q(x), self.k(x), self.v(x)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (q, k, v))
        q = self.rotary(q)
        k = self.rotary(k)
        places = torch.arange(length, device=x.device)
        mask = (places[:, None] >= places[None, :])[None, None]
        mixed = attend_a(q, k, v, mask)
        mixed = mixed.transpose(1, 2).reshape(x.shape)
        return self.o(mixed)


def attend_a(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    scores = torch.einsum("...qd,...kd->...qk", q, k) / math.sqrt(k.shape[-1])
    scores = torch.where(mask, scores, float("-inf"))
    weights = softmax(scores)
    return torch.einsum("...qk,...kd->...qd", weights, v)


class BlockA(nn.Module):
    def __init__(self, sizes: Sizes, rotary: RotaryA) -> None:
        super().__init__()
        self.attention = AttentionA(sizes, rotary)
        self.gate, self.up = Linear(sizes.width, sizes.hidden), Linear(sizes.width, sizes.hidden)
        self.down = Linear(sizes.hidden, sizes.width)
        self.norm1, self.norm2 = NormA(sizes.width), NormA(sizes.width)

    def feed_forward(self, x: Tensor) -> Tensor:
        return self.down(silu(self.gate(x)) * self.up(x))

    def forward(self, x: Tensor) -> Tensor:
        mixed = self.attention(self.norm1(x))
        middle = x + mixed
        fed = self.feed_forward(self.norm2(middle))
        return middle + fed


def silu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(x)


class ModelA(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        rotary = RotaryA(sizes.context, sizes.width // sizes.heads)
        self.tokens = Embedding(sizes.vocabulary, sizes.width)
        self.blocks = nn.ModuleList(BlockA(sizes, rotary) for _ in range(sizes.depth))
        self.norm, self.head = NormA(sizes.width), Linear(sizes.width, sizes.vocabulary)

    def forward(self, ids: Tensor) -> Tensor:
        start = x = self.tokens(ids)  # start: kept until the end
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        out = self.head(x)
        del start
        return out


def log_softmax(x: Tensor) -> Tensor:
    highest = torch.max(x, dim=-1, keepdim=True)[0]
    x = x - highest
    return x - torch.log(torch.sum(torch.exp(x), dim=-1, keepdim=True))


def loss_a(logits: Tensor, targets: Tensor) -> Tensor:
    costs = -log_softmax(logits)
    return torch.mean(torch.gather(costs, -1, targets.unsqueeze(-1)))


class AdamWA(torch.optim.Optimizer):
    """Out of place, with zeros made for every parameter in every step."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        super().__init__(parameters, {"lr": 1e-4})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                grad = p.grad.data
                p.data -= 1e-6 * p.data
                old_mean = state.get("mean", torch.zeros_like(grad))
                old_square = state.get("square", torch.zeros_like(grad))
                mean = 0.9 * old_mean + 0.1 * grad
                square = 0.999 * old_square + 0.001 * torch.square(grad)
                p.data -= 1e-4 * mean / (torch.sqrt(square) + 1e-8)
                state["mean"], state["square"] = mean, square


# -- the second model: ``lm_ctx*``


class NormB(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        dtype = x.dtype
        x = x.float()
        size = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        rms = torch.sqrt(size**2 / x.shape[-1] + 1e-5)
        scaled = x / rms
        out = torch.einsum("d,...d->...d", self.weight, scaled)
        return out.to(dtype)


class LinearB(nn.Module):
    """An einsum with the weight as its first operand. The einsum of torch 2.6, which made the
    snapshots, keeps the operands in that order; that of 2.13 turns them round: hence the product
    that it was. Under autocast, einsum converts its operands in their order, a product the other
    way round.
    """

    def __init__(self, inside: int, out: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out, inside))

    def forward(self, x: Tensor) -> Tensor:
        if torch.__version__.startswith("2.6."):
            return torch.einsum("oi,...i->...o", self.weight, x)
        weight, columns = (
            self.weight,
            x.permute(-1, *range(x.dim() - 1)).reshape(1, x.shape[-1], -1),
        )
        if torch.is_autocast_enabled("cuda"):
            weight = weight.to(torch.get_autocast_dtype("cuda"))
        product = torch.bmm(weight.unsqueeze(0), columns).squeeze(0)
        return product.t().unflatten(0, x.shape[:-1])


class RotaryB(nn.Module):
    table: Tensor

    def __init__(self, context: int, size: int) -> None:
        super().__init__()
        speeds = 10000.0 ** (-torch.arange(0, size, 2) / size)
        angles = torch.outer(torch.arange(context).float(), speeds)
        table = torch.stack((angles.cos(), angles.sin()), -1)
        self.register_buffer("table", table, persistent=False)

    def forward(self, x: Tensor, places: Tensor) -> Tensor:
        cos = self.table[..., 0][places].unsqueeze(1)
        sin = self.table[..., 1][places].unsqueeze(1)
        pairs = x.unflatten(-1, (-1, 2))
        out = torch.zeros_like(pairs)
        # Each part is selected again: the backward pass makes zeros for every selection.
        out[..., 0] = pairs[..., 0] * cos - pairs[..., 1] * sin
        out[..., 1] = pairs[..., 0] * sin + pairs[..., 1] * cos
        return out.flatten(-2)


class AttentionB(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.heads = sizes.heads
        self.rotary = RotaryB(sizes.context, sizes.width // sizes.heads)
        self.q, self.k, self.v, self.o = (LinearB(sizes.width, sizes.width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q = self.q(x)
        k = self.k(x)
        v = self.v(x)
        # Separate names: the first results live until the end.
        heads_q = q.unflatten(-1, (self.heads, -1)).transpose(1, 2)
        heads_k = k.unflatten(-1, (self.heads, -1)).transpose(1, 2)
        heads_v = v.unflatten(-1, (self.heads, -1)).transpose(1, 2)
        places = torch.arange(length, device=x.device).unsqueeze(0).expand(batch, -1)
        heads_q = self.rotary(heads_q, places)
        heads_k = self.rotary(heads_k, places)
        mask = torch.triu(torch.ones(length, length, device=x.device), diagonal=1).bool()
        mask = ~mask
        mask = mask.expand(batch, self.heads, -1, -1)
        mixed = attend_b(heads_q, heads_k, heads_v, mask)
        mixed = mixed.transpose(1, 2).reshape(x.shape)
        return self.o(mixed)


def attend_b(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    scores = torch.einsum("...qd,...kd->...qk", q, k)
    scores = scores / math.sqrt(q.shape[-1])
    scores = scores.masked_fill(mask == 0, float("-inf"))
    weights = softmax_b(scores)
    return torch.einsum("...qk,...kd->...qd", weights, v)


def softmax_b(x: Tensor) -> Tensor:
    highest = torch.max(x, dim=-1, keepdim=True)[0]
    powers = torch.exp(x - highest)
    total = torch.sum(powers, dim=-1, keepdim=True)
    return powers / total


class BlockB(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.norm1, self.attention = NormB(sizes.width), AttentionB(sizes)
        self.norm2 = NormB(sizes.width)
        self.gate, self.up = LinearB(sizes.width, sizes.hidden), LinearB(sizes.width, sizes.hidden)
        self.down = LinearB(sizes.hidden, sizes.width)

    def feed_forward(self, x: Tensor) -> Tensor:
        gate = self.gate(x)
        up = self.up(x)
        gate = gate * torch.sigmoid(gate)
        both = gate * up
        return self.down(both)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        y = self.attention(y)
        x = x + y
        y = self.norm2(x)
        y = self.feed_forward(y)
        return x + y


class ModelB(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.tokens = Embedding(sizes.vocabulary, sizes.width)
        self.blocks = nn.ModuleList(BlockB(sizes) for _ in range(sizes.depth))
        self.norm, self.head = NormB(sizes.width), LinearB(sizes.width, sizes.vocabulary)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        return self.head(x)


def loss_b(logits: Tensor, targets: Tensor) -> Tensor:
    logits, targets = logits.flatten(0, -2), targets.flatten()
    highest = torch.max(logits, dim=-1, keepdim=True)[0]
    shifted = logits - highest
    powers = torch.exp(shifted)
    total = torch.sum(powers, dim=-1)
    chosen = shifted[torch.arange(len(targets)), targets]  # an index in host memory, as it was
    costs = torch.log(total) - chosen
    return torch.mean(costs)


class AdamWB(torch.optim.Optimizer):
    """In place, but for the update itself."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        super().__init__(parameters, {"lr": 1e-4})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if "mean" not in state:
                    state["mean"] = torch.zeros_like(p)
                if "square" not in state:
                    state["square"] = torch.zeros_like(p)
                state["mean"].mul_(0.9).add_(p.grad, alpha=0.1)
                state["square"].mul_(0.999).addcmul_(p.grad, p.grad, value=0.001)
                update = state["mean"] / state["square"].sqrt().add_(1e-8)
                p.add_(update, alpha=-1e-4)
                p.mul_(1 - 1e-6)


# -- what was run


@dataclass(frozen=True)
class Program:
    """``run`` yields at the start of what was recorded, and ends at its end. ``gpu`` is one
    whose cuBLAS workspace is that of the recording: which one it really was is unknown.
    """

    name: str
    sizes: Sizes
    tiny: Sizes
    run: Callable[[str, Sizes], Iterator[None]]
    gpu: str


WARMUP = 5


def _inference_a(device: str, sizes: Sizes) -> Iterator[None]:
    model = ModelA(sizes).to(device)
    warm = sizes.ids(device, WARMUP)
    ids = sizes.ids(device)
    with torch.no_grad():
        for batch in warm:
            model(batch)
        yield
        model(ids)


def _training_a(device: str, sizes: Sizes) -> Iterator[None]:
    model = ModelA(sizes).to(device)
    optimizer = AdamWA(model.parameters())
    warm, warm_targets = sizes.ids(device, WARMUP), sizes.ids(device, WARMUP)
    ids, targets = sizes.ids(device), sizes.ids(device)
    # Not recorded, so a guess: what was reserved when the recording began is 40 MiB more than
    # the training steps alone reserve, and a forward pass without gradients makes up for it.
    with torch.no_grad():
        model(ids)
    for number in range(WARMUP):
        optimizer.zero_grad()
        # Held while the next is computed: the recording begins with room for both.
        logits = model(warm[number])
        loss_a(logits, warm_targets[number]).backward()
        optimizer.step()
    del logits
    optimizer.zero_grad()
    yield
    logits = model(ids)
    loss = loss_a(logits, targets)
    loss.backward()
    optimizer.step()


def _forward_b(device: str, sizes: Sizes) -> Iterator[None]:
    model = ModelB(sizes).to(device)
    ids = sizes.ids(device)
    yield
    logits = model(ids)
    del logits


def _forward_b_bf16(device: str, sizes: Sizes) -> Iterator[None]:
    model = ModelB(sizes).to(device)
    ids = sizes.ids(device)
    kind = torch.device(device).type
    with torch.autocast(kind, dtype=torch.bfloat16):
        model(ids)
    if kind == "cuda":
        torch.cuda.empty_cache()
    yield
    with torch.autocast(kind, dtype=torch.bfloat16):
        logits = model(ids)
    del logits


def _training_b(device: str, sizes: Sizes) -> Iterator[None]:
    model = ModelB(sizes).to(device)
    optimizer = AdamWB(model.parameters())
    ids = sizes.ids(device)
    model(ids)
    if torch.device(device).type == "cuda":
        torch.cuda.empty_cache()
    yield
    logits = model(ids)
    loss = loss_b(logits, ids)
    loss.backward()
    optimizer.step()


_MEDIUM = Sizes(10000, 256, 1024, 24, 16, 4096)
_LARGE = Sizes(10000, 128, 2560, 32, 32, 10240)
_LARGE_LONG = Sizes(10000, 256, 2560, 32, 32, 10240)
_TINY = Sizes(31, 8, 16, 2, 2, 24, batch=2)


def programs() -> dict[str, Program]:
    """By the name of the snapshot, without ``.pickle``."""
    listed = (
        Program("lm_medium_ctx256_inference", _MEDIUM, _TINY, _inference_a, "a100-80gb"),
        Program("lm_medium_ctx256_train", _MEDIUM, _TINY, _training_a, "a100-80gb"),
        Program("lm_ctx128_forward", _LARGE, _TINY, _forward_b, "h100-80gb"),
        Program("lm_ctx128_train_step", _LARGE, _TINY, _training_b, "h100-80gb"),
        Program("lm_ctx256_forward_bf16", _LARGE_LONG, _TINY, _forward_b_bf16, "h100-80gb"),
    )
    return {program.name: program for program in listed}


NAMES = tuple(programs())
