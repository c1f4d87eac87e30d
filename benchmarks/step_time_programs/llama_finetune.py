"""Finetuning of Llama, Mistral and Granite models by transformers, for the rows of vectorlm and
fms-acceleration.

Plain torch in place of transformers' modelling code, with its operators: RMS norms in float32,
rotary embeddings by halves, logits converted to float32, FlashAttention-2; each block is computed
again in the backward pass. ``--fused``: norms, rotary embeddings and loss are compiled, as they
are Triton kernels in the row. ``--adapters``: LoRA of this rank on ``--targets``, in float32 with
``--wide-adapters``. ``--sharded``: FSDP; adapters are units of their own. ``--mixed``: FSDP
computes in bfloat16; weights of full finetuning are in float32. ``--trainer hf``: as Hugging
Face's Trainer; ``vectorlm``: as its benchmark, which never comes to the optimizer, nor
synchronises.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import BackwardPrefetch, MixedPrecision
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import lambda_auto_wrap_policy
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

LOW = torch.bfloat16


def normed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
    return weight * wide.to(x.dtype)


def turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def loss_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits, labels)


class Norm(nn.Module):
    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(options.width))
        self.call = options.normed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.call(x, self.weight)


class Adapted(nn.Linear):
    """As PEFT's LoRA."""

    def __init__(self, inputs: int, outputs: int, options: argparse.Namespace) -> None:
        super().__init__(inputs, outputs, bias=False)
        rank = options.adapters
        self.drop = nn.Dropout(0.1)
        self.down, self.up = (
            nn.Linear(*each, bias=False) for each in ((inputs, rank), (rank, outputs))
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = super().forward(x)
        wide = x.to(self.down.weight.dtype)
        return (found + self.up(self.down(self.drop(wide))) * 2.0).to(found.dtype)


class Block(nn.Module):
    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__()
        width, self.size = options.width, options.width // options.heads
        keys = self.size * options.key_heads
        self.scale = 0.22 if options.granite else 1.0
        self.call, self.granite = options.turned, options.granite
        self.norm_1, self.norm_2 = Norm(options), Norm(options)
        sizes = {"q": (width, width), "k": (width, keys), "v": (width, keys), "o": (width, width)}
        self.parts = nn.ModuleDict()
        for name, (inputs, outputs) in sizes.items():
            adapted = options.adapters and name in options.targets
            self.parts[name] = (
                Adapted(inputs, outputs, options)
                if adapted
                else nn.Linear(inputs, outputs, bias=False)
            )
        self.gate, self.up = (nn.Linear(width, options.mlp, bias=False) for _ in range(2))
        self.down = nn.Linear(options.mlp, width, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        x = self.added(x, self.attention(self.norm_1(x), cos, sin))
        y = self.norm_2(x)
        return self.added(x, self.down(F.silu(self.gate(y)) * self.up(y)))

    def added(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x + y * self.scale if self.granite else x + y

    def attention(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        query, key, value = (
            self.parts[name](x).view(batch, length, -1, self.size).transpose(1, 2) for name in "qkv"
        )
        query, key = self.call(query, cos, sin), self.call(key, cos, sin)
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            y = F.scaled_dot_product_attention(
                query.to(LOW), key.to(LOW), value.to(LOW), is_causal=True, enable_gqa=True
            )
        return self.parts["o"](y.transpose(1, 2).reshape(batch, length, width))


class Llama(nn.Module):
    def __init__(self, options: argparse.Namespace, layers: int) -> None:
        super().__init__()
        self.size, self.options = options.width // options.heads, options
        self.words = nn.Embedding(options.vocabulary, options.width)
        self.blocks = nn.ModuleList([Block(options) for _ in range(layers)])
        self.norm = Norm(options)
        self.head = nn.Linear(options.width, options.vocabulary, bias=False)
        if options.tied:
            self.head.weight = self.words.weight

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.words(ids)
        if self.options.granite:
            x = x * 12.0
        if not x.requires_grad:
            x.requires_grad_()
        turns = 1 / 10000 ** (torch.arange(0, self.size, 2, device=x.device).float() / self.size)
        angles = torch.outer(torch.arange(x.shape[1], device=x.device).float(), turns)
        angles = torch.cat((angles, angles), dim=-1)
        cos, sin = angles.cos().to(LOW), angles.sin().to(LOW)
        for block in self.blocks:
            reentrant = self.options.trainer == "hf"
            x = checkpoint(block, x, cos, sin, use_reentrant=reentrant)
        logits = self.head(self.norm(x))
        if self.options.granite:
            logits = logits / 16.0
        logits = logits.float()[:, :-1].contiguous()
        labels = labels[:, 1:].contiguous()
        return self.options.loss_of(logits.view(-1, logits.shape[-1]), labels.view(-1))


def made(options: argparse.Namespace, layers: int) -> nn.Module:
    with torch.device("meta"):
        model = Llama(options, layers).to(LOW)
    if options.adapters:
        model.requires_grad_(False)
        for module in model.modules():
            if isinstance(module, Adapted):
                for part in (module.down, module.up):
                    part.requires_grad_(True)
                    part.to(torch.float32 if options.wide_adapters else LOW)
    elif options.mixed and options.trainer == "hf":
        model.to(torch.float32)
    if not options.sharded:
        return model.to_empty(device="cuda")

    def unit(module: nn.Module) -> bool:
        if isinstance(module, Block):
            return True
        weight = getattr(module, "weight", None)
        leaf = bool(options.adapters) and not list(module.children())
        return leaf and weight is not None and weight.requires_grad

    return FSDP(
        model,
        auto_wrap_policy=functools.partial(lambda_auto_wrap_policy, lambda_fn=unit),
        mixed_precision=MixedPrecision(LOW, LOW, LOW) if options.mixed else None,
        backward_prefetch=BackwardPrefetch.BACKWARD_PRE,
        limit_all_gathers=True,
        use_orig_params=bool(options.adapters) and options.trainer == "hf",
        device_id=torch.cuda.current_device(),
        param_init_fn=lambda module: module.to_empty(device="cuda", recurse=False),
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    sizes = {"width": 4096, "heads": 32, "key_heads": 8, "mlp": 14336, "vocabulary": 128256}
    for name, size in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=size)
    for name in ("granite", "tied", "fused", "sharded", "mixed", "autocast", "wide-adapters"):
        parser.add_argument(f"--{name}", action="store_true")
    parser.add_argument("--adapters", type=int, default=0)
    parser.add_argument("--targets", default="qkvo")
    parser.add_argument("--trainer", choices=("hf", "vectorlm"), default="hf")
    parser.add_argument("--runs", default="4096x4x2", help="sequence, micro-batch, layers")
    parser.add_argument("--accumulation", default="1,1")
    options = parser.parse_args()
    for name, call in (("normed", normed), ("turned", turned), ("loss_of", loss_of)):
        setattr(options, name, torch.compile(call, dynamic=False) if options.fused else call)
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if options.sharded:
        if "RANK" not in os.environ:
            os.environ.update(
                RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="29500"
            )
        dist.init_process_group("nccl")
    for run in options.runs.split(","):
        torch._dynamo.reset()
        length, batch, layers = map(int, run.split("x"))
        train(options, made(options, layers), (batch, length))


def train(options: argparse.Namespace, model: Any, size: tuple[int, int]) -> None:
    hf = options.trainer == "hf"
    trained = [each for each in model.parameters() if each.requires_grad]
    nothing = [torch.zeros(1, device="cuda", requires_grad=True)]
    optimizer: torch.optim.Optimizer = torch.optim.SGD(nothing, lr=0.1)
    if hf:
        optimizer = torch.optim.AdamW(trained, lr=2e-5, eps=1e-4, weight_decay=0.01)
    total = torch.zeros((), device="cuda")
    model.train()
    for _ in options.accumulation.split(","):
        ids, labels = (torch.randint(options.vocabulary, size) for _ in range(2))
        ids, labels = ids.cuda(), labels.cuda()
        context = contextlib.nullcontext() if hf else model.no_sync()
        with context:
            with torch.autocast("cuda", LOW, enabled=options.autocast):
                loss = model(ids, labels)
            (loss if hf else loss / 4).backward()
            if isinstance(model, FSDP):
                model.clip_grad_norm_(1.0)
            else:
                nn.utils.clip_grad_norm_(trained, 1.0)
        if hf:
            optimizer.step()
            model.zero_grad()
            detached = loss.detach()
            if not (torch.isnan(detached) or torch.isinf(detached)):
                total += detached
        else:
            losses = torch.empty(dist.get_world_size(), device="cuda")
            dist.all_gather_into_tensor(losses, loss.detach().reshape(1))
            losses.mean().item()
            optimizer.step()  # ends a step, without gradients and work


if __name__ == "__main__":
    main()
