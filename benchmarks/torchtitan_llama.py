"""Llama 3.1 8B with FSDP2, as torchtitan trained it: the program of ``torchtitan_rows.py``.

Plain torch, with the model's dimensions and the settings of torchtitan's ``llama3_8b.toml`` at
9dec370: parameters and activations in bfloat16, gradients reduced in float32, every second matrix
product of a block recomputed, the loss in float32, gradients clipped, AdamW. RMSNorm is written as
the several kernels that it was in torch 2.6.
"""

from __future__ import annotations

import os
from collections import defaultdict
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

DIM, LAYERS, HEADS, KV_HEADS, HIDDEN, VOCABULARY = 4096, 32, 32, 8, 14336, 128256
BATCH, LENGTH, STEPS = 2, 8192, 3


class RMSNorm(nn.Module):
    """As ``rms_norm`` in torch 2.6: ``aten/src/ATen/native/layer_norm.cpp``."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(DIM))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True).add_(1e-5))
        return wide.mul(scale).type_as(x).mul(self.weight)


def rotated(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * angles.view(1, LENGTH, 1, -1)).flatten(3).type_as(x)


def repeated(x: torch.Tensor) -> torch.Tensor:
    batch, length, heads, size = x.shape
    times = HEADS // heads
    wide = x.unsqueeze(3).expand(batch, length, heads, times, size)
    return wide.reshape(batch, length, heads * times, size)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        size = DIM // HEADS
        self.wq = nn.Linear(DIM, HEADS * size, bias=False)
        self.wk = nn.Linear(DIM, KV_HEADS * size, bias=False)
        self.wv = nn.Linear(DIM, KV_HEADS * size, bias=False)
        self.wo = nn.Linear(HEADS * size, DIM, bias=False)

    def forward(self, x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        xq, xk, xv = self.wq(x), self.wk(x), self.wv(x)
        xq = xq.view(batch, length, -1, DIM // HEADS)
        xk = xk.view(batch, length, -1, DIM // HEADS)
        xv = xv.view(batch, length, -1, DIM // HEADS)
        xq, xk = rotated(xq, angles), rotated(xk, angles)
        keys, values = repeated(xk), repeated(xv)
        xq, xk, xv = xq.transpose(1, 2), keys.transpose(1, 2), values.transpose(1, 2)
        output = F.scaled_dot_product_attention(xq, xk, xv, is_causal=True)
        return self.wo(output.transpose(1, 2).contiguous().view(batch, length, -1))


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1 = nn.Linear(DIM, HIDDEN, bias=False)
        self.w2 = nn.Linear(HIDDEN, DIM, bias=False)
        self.w3 = nn.Linear(DIM, HIDDEN, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention()
        self.feed_forward = FeedForward()
        self.attention_norm = RMSNorm()
        self.ffn_norm = RMSNorm()

    def forward(self, x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        h = x + self.attention(self.attention_norm(x), angles)
        return h + self.feed_forward(self.ffn_norm(h))


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCABULARY, DIM)
        self.register_buffer("angles", torch.zeros(LENGTH, DIM // HEADS // 2, dtype=torch.cfloat))
        self.layers = nn.ModuleDict({str(number): Block() for number in range(LAYERS)})
        self.norm = RMSNorm()
        self.output = nn.Linear(DIM, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        h = self.tok_embeddings(tokens)
        for layer in self.layers.values():
            h = layer(h, self.angles)
        h = self.norm(h)
        return self.output(h)


KEPT = {
    torch.ops.aten.mm.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops._c10d_functional.reduce_scatter_tensor.default,
    torch.ops.aten.max.default,
}


def contexts() -> Any:
    counts: dict[bool, int] = defaultdict(int)

    def policy(context: Any, func: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        product = func == torch.ops.aten.mm.default
        counts[context.is_recompute] += product
        if func in KEPT and not (product and counts[context.is_recompute] % 2 == 0):
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def main() -> None:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    mesh = init_device_mesh("cuda", (dist.get_world_size(),), mesh_dim_names=("dp_shard",))
    with torch.device("meta"):
        model = Transformer()
    for name, block in model.layers.named_children():
        wrapped = checkpoint_wrapper(block, context_fn=contexts, preserve_rng_state=False)
        model.layers.register_module(name, wrapped)
    mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for name, block in model.layers.items():
        last = int(name) == LAYERS - 1
        fully_shard(block, mesh=mesh, mp_policy=mixed, reshard_after_forward=not last)
    fully_shard(model, mesh=mesh, mp_policy=mixed, reshard_after_forward=True)
    model.to_empty(device="cuda")
    with torch.no_grad():
        model.angles = torch.polar(
            torch.ones(LENGTH, DIM // HEADS // 2, device="cuda"),
            torch.rand(LENGTH, DIM // HEADS // 2, device="cuda"),
        )
        for parameter in model.parameters():
            nn.init.trunc_normal_(parameter, std=0.02)
    model.train()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, foreach=True
    )
    for _ in range(STEPS):
        batch = torch.randint(VOCABULARY, (BATCH, LENGTH + 1))
        tokens, labels = batch[:, :-1].cuda(), batch[:, 1:].cuda()
        optimizer.zero_grad()
        pred = model(tokens)
        loss = F.cross_entropy(pred.flatten(0, 1).float(), labels.flatten(0, 1))
        del pred
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()


if __name__ == "__main__":
    main()
