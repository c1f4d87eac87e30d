"""Language models in plain PyTorch: GPT-2, Llama-style, BERT, T5-style, mixture of experts."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .training import Work


def tokens(vocabulary: int, *shape: int, seed: int) -> Tensor:
    return torch.randint(
        0, vocabulary, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.long
    )


def embedding(rows: int, width: int, padding: int | None = None) -> nn.Embedding:
    """An embedding with small values: with torch's own, fp16 gradients would overflow, steps
    would be skipped, and the memory recorded would depend on when.
    """
    made = nn.Embedding(rows, width, padding_idx=padding)
    nn.init.normal_(made.weight, std=0.02)
    return made


def heads(x: Tensor, count: int) -> Tensor:
    """(batch, time, width) as (batch, count, time, width / count)."""
    return x.unflatten(-1, (count, -1)).transpose(1, 2)


def merged(x: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(2)


def token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


# -- GPT-2


class GPTBlock(nn.Module):
    def __init__(self, width: int, head_count: int, dropout: float) -> None:
        super().__init__()
        self.head_count, self.dropout = head_count, dropout
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (heads(part, self.head_count) for part in self.qkv(self.norm1(x)).chunk(3, -1))
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropout)
        x = x + F.dropout(self.project(merged(mixed)), self.dropout, self.training)
        hidden = self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))
        return x + F.dropout(hidden, self.dropout, self.training)


class GPT(nn.Module):
    """GPT-2 with its tied output layer."""

    def __init__(
        self,
        vocabulary: int,
        context: int,
        width: int,
        depth: int,
        head_count: int,
        dropout: float,
        checkpointed: bool,
    ) -> None:
        super().__init__()
        self.dropout, self.checkpointed = dropout, checkpointed
        self.tokens, self.places = embedding(vocabulary, width), embedding(context, width)
        self.blocks = nn.ModuleList(GPTBlock(width, head_count, dropout) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        places = torch.arange(ids.shape[1], device=ids.device)
        x = F.dropout(self.tokens(ids) + self.places(places), self.dropout, self.training)
        for block in self.blocks:
            if self.checkpointed:
                x = checkpoint(block, x, use_reentrant=False)
            else:
                x = block(x)
        return self.head(self.norm(x))


def gpt(
    *,
    width: int = 768,
    depth: int = 12,
    head_count: int = 12,
    vocabulary: int = 50257,
    batch: int,
    length: int,
    dropout: float = 0.1,
    checkpointed: bool = False,
) -> Work:
    model = GPT(vocabulary, length, width, depth, head_count, dropout, checkpointed)

    def data(step: int) -> tuple[Tensor, ...]:
        ids = tokens(vocabulary, batch, length + 1, seed=step)
        return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()

    return Work(model, data, lambda model, ids, labels: token_loss(model(ids), labels))


# -- Llama style: RMSNorm, RoPE, grouped queries, SwiGLU


class RMSNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return wide.to(x.dtype) * self.weight


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


class LlamaBlock(nn.Module):
    def __init__(self, width: int, head_count: int, kv_heads: int, hidden: int) -> None:
        super().__init__()
        self.head_count, self.kv_heads = head_count, kv_heads
        size = width // head_count
        self.norm1, self.norm2 = RMSNorm(width), RMSNorm(width)
        self.q = nn.Linear(width, width, bias=False)
        self.k = nn.Linear(width, kv_heads * size, bias=False)
        self.v = nn.Linear(width, kv_heads * size, bias=False)
        self.o = nn.Linear(width, width, bias=False)
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, cache: list[Tensor] | None = None
    ) -> Tensor:
        y = self.norm1(x)
        q = rotated(heads(self.q(y), self.head_count), cos, sin)
        k = rotated(heads(self.k(y), self.kv_heads), cos, sin)
        v = heads(self.v(y), self.kv_heads)
        causal = True
        if cache is not None:
            if cache:
                k, v = torch.cat((cache[0], k), 2), torch.cat((cache[1], v), 2)
                causal = False
            cache[:] = [k, v]
        groups = self.head_count // self.kv_heads
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
        x = x + self.o(merged(mixed))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    cos: Tensor
    sin: Tensor

    def __init__(
        self,
        vocabulary: int,
        context: int,
        width: int,
        depth: int,
        head_count: int,
        kv_heads: int,
        hidden: int,
    ) -> None:
        super().__init__()
        self.tokens = embedding(vocabulary, width)
        self.blocks = nn.ModuleList(
            LlamaBlock(width, head_count, kv_heads, hidden) for _ in range(depth)
        )
        self.norm = RMSNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        size = width // head_count
        speeds = 10000.0 ** (-torch.arange(0, size, 2) / size)
        angles = torch.outer(torch.arange(context).float(), speeds).repeat(1, 2)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(
        self, ids: Tensor, start: int = 0, caches: list[list[Tensor]] | None = None
    ) -> Tensor:
        x = self.tokens(ids)
        cos = self.cos[start : start + ids.shape[1]].to(x.dtype)
        sin = self.sin[start : start + ids.shape[1]].to(x.dtype)
        for index, block in enumerate(self.blocks):
            x = block(x, cos, sin, None if caches is None else caches[index])
        return self.head(self.norm(x))


def _llama(
    vocabulary: int, length: int, width: int, depth: int, head_count: int, kv_heads: int
) -> Llama:
    hidden = 8 * math.ceil(8 * width / 3 / 8)
    return Llama(vocabulary, length, width, depth, head_count, kv_heads, hidden)


def llama(
    *,
    width: int = 1024,
    depth: int = 12,
    head_count: int = 16,
    kv_heads: int = 4,
    vocabulary: int = 32000,
    batch: int,
    length: int,
) -> Work:
    def data(step: int) -> tuple[Tensor, ...]:
        ids = tokens(vocabulary, batch, length + 1, seed=step)
        return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()

    model = _llama(vocabulary, length, width, depth, head_count, kv_heads)
    return Work(model, data, lambda model, ids, labels: token_loss(model(ids), labels))


def llama_generation(
    device: str,
    *,
    width: int = 1024,
    depth: int = 12,
    head_count: int = 16,
    kv_heads: int = 4,
    vocabulary: int = 32000,
    batch: int,
    prompt: int,
    new: int,
) -> Callable[[], Tensor]:
    """Each step reads a prompt and generates ``new`` tokens with a key-value cache."""
    model = _llama(vocabulary, prompt + new, width, depth, head_count, kv_heads)
    model = model.to(device=device, dtype=torch.bfloat16).eval()
    count = 0

    @torch.inference_mode()
    def step() -> Tensor:
        nonlocal count
        count += 1
        ids = tokens(vocabulary, batch, prompt, seed=count).to(device)
        caches: list[list[Tensor]] = [[] for _ in model.blocks]
        start, made = 0, []
        for _ in range(new):
            logits = model(ids, start, caches)[:, -1]
            start += ids.shape[1]
            ids = logits.argmax(-1, keepdim=True)
            made.append(ids)
        return torch.cat(made, 1).float().mean()

    return step


# -- BERT


class BertLayer(nn.Module):
    def __init__(self, width: int, head_count: int, dropout: float) -> None:
        super().__init__()
        self.head_count, self.p = head_count, dropout
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = (heads(layer(x), self.head_count) for layer in (self.q, self.k, self.v))
        p = self.p if self.training else 0.0
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=p)
        x = self.norm1(x + self.dropout(self.o(merged(mixed))))
        return self.norm2(x + self.dropout(self.down(F.gelu(self.up(x)))))


class Bert(nn.Module):
    def __init__(
        self, vocabulary: int, context: int, width: int, depth: int, head_count: int, dropout: float
    ) -> None:
        super().__init__()
        self.tokens = embedding(vocabulary, width, 0)
        self.places, self.kinds = embedding(context, width), embedding(2, width)
        self.norm, self.dropout = nn.LayerNorm(width), nn.Dropout(dropout)
        self.layers = nn.ModuleList(BertLayer(width, head_count, dropout) for _ in range(depth))
        self.transform, self.norm2 = nn.Linear(width, width), nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, ids: Tensor, kinds: Tensor) -> Tensor:
        places = torch.arange(ids.shape[1], device=ids.device)
        x = self.tokens(ids) + self.places(places) + self.kinds(kinds)
        x = self.dropout(self.norm(x))
        mask = (ids != 0)[:, None, None, :].expand(-1, 1, ids.shape[1], -1)
        for layer in self.layers:
            x = layer(x, mask)
        return self.head(self.norm2(F.gelu(self.transform(x))))


def bert(
    *,
    width: int = 768,
    depth: int = 12,
    head_count: int = 12,
    vocabulary: int = 30522,
    batch: int,
    length: int,
) -> Work:
    """Masked language modelling on padded sequences of different lengths."""
    model = Bert(vocabulary, length, width, depth, head_count, 0.1)

    def data(step: int) -> tuple[Tensor, ...]:
        ids = tokens(vocabulary - 1, batch, length, seed=step) + 1
        lengths = length - torch.arange(batch) * (length // (2 * batch))
        padded = torch.arange(length)[None, :] >= lengths[:, None]
        chosen = tokens(7, batch, length, seed=step + 1000) == 0
        labels = ids.masked_fill(padded | ~chosen, -100)
        kinds = (torch.arange(length) >= length // 2).long().expand(batch, -1).contiguous()
        return ids.masked_fill(padded, 0), kinds, labels

    return Work(
        model, data, lambda model, ids, kinds, labels: token_loss(model(ids, kinds), labels)
    )


# -- T5 style: encoder and decoder, relative positions as a bias that is added


class T5Attention(nn.Module):
    def __init__(self, width: int, head_count: int) -> None:
        super().__init__()
        self.head_count = head_count
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(self, x: Tensor, memory: Tensor, bias: Tensor | None) -> Tensor:
        q, k, v = (heads(y, self.head_count) for y in (self.q(x), self.k(memory), self.v(memory)))
        return self.o(merged(F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=1.0)))


class T5Layer(nn.Module):
    def __init__(self, width: int, head_count: int, crossing: bool) -> None:
        super().__init__()
        self.norms = nn.ModuleList(RMSNorm(width) for _ in range(3 if crossing else 2))
        self.attention = T5Attention(width, head_count)
        self.cross = T5Attention(width, head_count) if crossing else None
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor, bias: Tensor, memory: Tensor | None = None) -> Tensor:
        y = self.norms[0](x)
        x = x + self.dropout(self.attention(y, y, bias))
        if self.cross is not None:
            assert memory is not None
            x = x + self.dropout(self.cross(self.norms[1](x), memory, None))
        return x + self.dropout(self.down(F.relu(self.up(self.norms[-1](x)))))


class T5Stack(nn.Module):
    def __init__(self, width: int, depth: int, head_count: int, decoding: bool) -> None:
        super().__init__()
        self.decoding = decoding
        self.layers = nn.ModuleList(T5Layer(width, head_count, decoding) for _ in range(depth))
        self.distances = embedding(32, head_count)
        self.norm = RMSNorm(width)

    def bias(self, length: int, device: torch.device) -> Tensor:
        places = torch.arange(length, device=device)
        gaps = places[None, :] - places[:, None]
        bias = self.distances(gaps.abs().clamp(max=15) + 16 * (gaps > 0)).permute(2, 0, 1)[None]
        if self.decoding:
            bias = bias.masked_fill(gaps > 0, float("-inf"))
        return bias

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        bias = self.bias(x.shape[1], x.device)
        for layer in self.layers:
            x = layer(x, bias.to(x.dtype), memory)
        return self.norm(x)


class T5(nn.Module):
    def __init__(self, vocabulary: int, width: int, depth: int, head_count: int) -> None:
        super().__init__()
        self.tokens = embedding(vocabulary, width)
        self.encoder = T5Stack(width, depth, head_count, decoding=False)
        self.decoder = T5Stack(width, depth, head_count, decoding=True)
        self.scale = width**-0.5

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        memory = self.encoder(self.tokens(source))
        x = self.decoder(self.tokens(target), memory)
        return F.linear(x * self.scale, self.tokens.weight)


def t5(
    *,
    width: int = 512,
    depth: int = 6,
    head_count: int = 8,
    vocabulary: int = 32128,
    batch: int,
    length: int,
) -> Work:
    def data(step: int) -> tuple[Tensor, ...]:
        source = tokens(vocabulary, batch, length, seed=step)
        target = tokens(vocabulary, batch, length // 2 + 1, seed=step + 1000)
        return source, target[:, :-1].contiguous(), target[:, 1:].contiguous()

    return Work(
        T5(vocabulary, width, depth, head_count),
        data,
        lambda model, source, target, labels: token_loss(model(source, target), labels),
    )


# -- mixture of experts


class Experts(nn.Module):
    """Every token goes to two of the experts. How many go to each depends on the values."""

    def __init__(self, width: int, hidden: int, count: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, count, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))
            for _ in range(count)
        )

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, -2)
        weights, chosen = self.router(flat).float().softmax(-1).topk(2, -1)
        weights = (weights / weights.sum(-1, keepdim=True)).to(x.dtype)
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            rows, slots = torch.where(chosen == number)
            made = expert(flat[rows]) * weights[rows, slots, None]
            out.index_add_(0, rows, made.to(out.dtype))
        return out.view_as(x)


class MoEBlock(nn.Module):
    def __init__(self, width: int, head_count: int, experts: int) -> None:
        super().__init__()
        self.head_count = head_count
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.o = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.experts = Experts(width, 2 * width, experts)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (heads(part, self.head_count) for part in self.qkv(self.norm1(x)).chunk(3, -1))
        x = x + self.o(merged(F.scaled_dot_product_attention(q, k, v, is_causal=True)))
        return x + self.experts(self.norm2(x))


class MoE(nn.Module):
    def __init__(
        self, vocabulary: int, width: int, depth: int, head_count: int, experts: int
    ) -> None:
        super().__init__()
        self.tokens = embedding(vocabulary, width)
        self.blocks = nn.ModuleList(MoEBlock(width, head_count, experts) for _ in range(depth))
        self.head = nn.Linear(width, vocabulary)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def moe(
    *,
    width: int = 512,
    depth: int = 6,
    head_count: int = 8,
    experts: int = 8,
    vocabulary: int = 16000,
    batch: int,
    length: int,
) -> Work:
    def data(step: int) -> tuple[Tensor, ...]:
        ids = tokens(vocabulary, batch, length + 1, seed=step)
        return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()

    return Work(
        MoE(vocabulary, width, depth, head_count, experts),
        data,
        lambda model, ids, labels: token_loss(model(ids), labels),
    )
