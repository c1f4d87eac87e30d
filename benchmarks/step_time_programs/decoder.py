"""A training step of a decoder, for the rows of MosaicML, nanoGPT and llm.c in the truths.

Plain torch. What differs from the published programs: attention of the first FlashAttention is
`scaled_dot_product_attention` with its memory-efficient kernel, which is about as fast
(FlashAttention-2, arXiv 2307.08691, figures 4 to 6); a fused cross-entropy is a softmax in place,
one pass over the logits more. FSDP as Composer configures it: a unit for each block, all-gather
and reduce-scatter in each micro-batch, the next unit gathered after the gradients of the one
before. Its trainer computes two metrics of the logits in each micro-batch (``--metrics``), as far
as the fitted rows show: without them what is missing is proportional to the logits. Rows of
mosaicml-examples with activation checkpointing are 1.25 times as slow as those without, as if each
block ran forward a third time (``--checkpointing 2``); its reason is unknown.

Options are those of `arguments`. ``--runs 2048x32x12``: sequence length, micro-batch, layers; of
several each is a model of its own. ``--accumulation 1,1,2``: micro-batches of each step.
"""

from __future__ import annotations

import argparse
import contextlib
import os
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as checkpoints
from torch.distributed.fsdp import (
    BackwardPrefetch,
    MixedPrecision,
    ShardingStrategy,
)
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.parallel import DistributedDataParallel


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    for name, size in (("width", 768), ("heads", 12), ("vocabulary", 50368)):
        parser.add_argument(f"--{name}", type=int, default=size)
    parser.add_argument("--runs", default="2048x4x12")
    parser.add_argument("--accumulation", default="1,1,2")
    parser.add_argument("--parallel", choices=("full", "grad", "ddp"), default="full")
    parser.add_argument("--reduce", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--checkpointing", type=int, default=0, help="how often a block runs again")
    parser.add_argument("--metrics", type=int, default=0, help="cross-entropies of the logits")
    parser.add_argument("--offload", action="store_true", help="of activations, to the CPU")
    parser.add_argument("--norm", choices=("low", "autocast"), default="low")
    parser.add_argument("--attention", choices=("efficient", "flash", "math"), default="efficient")
    parser.add_argument("--loss", choices=("fused", "autocast"), default="fused")
    parser.add_argument("--optimizer", choices=("decoupled", "adamw", "fused"), default="decoupled")
    parser.add_argument("--no-biases", action="store_true")
    parser.add_argument("--float8", action="store_true", help="linear layers of the blocks")
    parser.add_argument("--flat", action="store_true", help="the optimizer has FSDP's flat tensors")
    return parser.parse_args()


class LowPrecisionNorm(nn.LayerNorm):
    """In the type of its parameters, which FSDP gathers in bfloat16."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cuda", enabled=False):
            bias = None if self.bias is None else self.bias.to(x.dtype)
            return F.layer_norm(x, self.normalized_shape, self.weight.to(x.dtype), bias, self.eps)


class Float8Product(torch.autograd.Function):
    """As TransformerEngine's: inputs and weights in e4m3, gradients in e5m2, each also transposed
    for the products of the backward pass; scales are those of the step before.
    """

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1]).to(torch.float8_e4m3fn)
        low = weight.to(torch.float8_e4m3fn)
        ctx.save_for_backward(rows.t().contiguous(), low.t().contiguous())
        ctx.biased = bias is not None
        found = _product(rows, low, None if bias is None else bias.to(torch.bfloat16))
        return found.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        rows, weight = ctx.saved_tensors
        grad = grads[0].reshape(-1, grads[0].shape[-1])
        low = grad.to(torch.float8_e5m2)
        of_x = _product(low, weight).view(*grads[0].shape[:-1], -1)
        bias = grad.sum(0) if ctx.biased else None
        return of_x, _product(low.t().contiguous(), rows), bias


def _product(one: torch.Tensor, other: torch.Tensor, bias: Any = None) -> torch.Tensor:
    """``one @ other.T`` in bfloat16, with scales that a kernel reads."""
    scale = torch.ones((), device=one.device)
    return torch._scaled_mm(one, other.t(), scale, scale, bias=bias, out_dtype=torch.bfloat16)


class Float8Linear(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cuda", enabled=False):
            return Float8Product.apply(x, self.weight, self.bias)


class Block(nn.Module):
    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__()
        width, biases = options.width, not options.no_biases
        norm = LowPrecisionNorm if options.norm == "low" else nn.LayerNorm
        self.heads = options.heads
        self.plain = options.attention == "math"
        self.norm_1, self.norm_2 = (norm(width, bias=biases) for _ in range(2))
        linear = Float8Linear if options.float8 else nn.Linear
        self.qkv = linear(width, 3 * width, bias=biases)
        self.out = linear(width, width, bias=biases)
        self.up = linear(width, 4 * width, bias=biases)
        self.down = linear(4 * width, width, bias=biases)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm_1(x))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))

    def attention(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        query, key, value = (
            each.view(batch, length, self.heads, -1).transpose(1, 2)
            for each in self.qkv(x).chunk(3, dim=-1)
        )
        if self.plain:
            scores = query @ key.transpose(-2, -1) * (width // self.heads) ** -0.5
            mask = torch.ones(length, length, dtype=torch.bool, device=x.device).tril()
            y = F.softmax(scores.masked_fill(~mask, float("-inf")), dim=-1) @ value
        else:
            y = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, length, width))


class Again(nn.Module):
    """A module that runs forward once more, for nothing."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.module(x)
        return self.module(x)


class Decoder(nn.Module):
    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__()
        self.tokens = nn.Embedding(options.vocabulary, options.width)
        self.positions = nn.Embedding(options.sequence, options.width)
        self.blocks = nn.ModuleList([Block(options) for _ in range(options.layers)])
        norm = LowPrecisionNorm if options.norm == "low" else nn.LayerNorm
        self.norm = norm(options.width, bias=not options.no_biases)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        places = torch.arange(ids.shape[1], device=ids.device).unsqueeze(0)
        x = self.tokens(ids) + self.positions(places)
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.tokens.weight)


class FusedCrossEntropy(torch.autograd.Function):
    """Probabilities take the place of the logits, and gradients theirs."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        torch.softmax(logits, -1, out=logits)
        ctx.save_for_backward(logits, labels)
        return logits.gather(1, labels.unsqueeze(1)).float().log().mean().neg()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        probabilities, labels = ctx.saved_tensors
        rows = torch.arange(len(labels), device=labels.device)
        probabilities[rows, labels] -= 1
        return probabilities.mul_(grads[0] / len(labels)), None


class DecoupledAdamW(torch.optim.Optimizer):
    """One operator after another for each parameter, as Composer's optimizer of this name."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 1e-4, "betas": (0.9, 0.95), "eps": 1e-8})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            first, second = group["betas"]
            for parameter in group["params"]:
                if parameter.grad is None or not parameter.numel():
                    continue
                state = self.state[parameter]
                if not state:
                    state["step"] = 0
                    state["mean"] = torch.zeros_like(parameter)
                    state["square"] = torch.zeros_like(parameter)
                state["step"] += 1
                state["mean"].mul_(first).add_(parameter.grad, alpha=1 - first)
                state["square"].mul_(second).addcmul_(
                    parameter.grad, parameter.grad, value=1 - second
                )
                root = (1 - second ** state["step"]) ** 0.5
                bottom = (state["square"].sqrt() / root).add_(group["eps"])
                parameter.mul_(1 - 1e-8)
                parameter.addcdiv_(state["mean"], bottom, value=-group["lr"])


def sharded(options: argparse.Namespace) -> nn.Module:
    with torch.device("meta"):
        model = Decoder(options)
    low = torch.bfloat16
    strategies = {"full": ShardingStrategy.FULL_SHARD, "grad": ShardingStrategy.SHARD_GRAD_OP}
    wrapped = FSDP(
        model,
        sharding_strategy=strategies[options.parallel],
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        mixed_precision=MixedPrecision(low, getattr(torch, options.reduce), low),
        backward_prefetch=BackwardPrefetch.BACKWARD_POST,
        limit_all_gathers=True,
        use_orig_params=not options.flat,
        device_id=torch.cuda.current_device(),
        param_init_fn=lambda module: module.to_empty(device="cuda", recurse=False),
    )
    if options.checkpointing:

        def wrapper(module: nn.Module) -> nn.Module:
            module = checkpoints.checkpoint_wrapper(module)
            if options.offload:
                module = checkpoints.offload_wrapper(module)
            return Again(module) if options.checkpointing > 1 else module

        checkpoints.apply_activation_checkpointing(
            wrapped, checkpoint_wrapper_fn=wrapper, check_fn=lambda each: isinstance(each, Block)
        )
    return wrapped


def optimizer_of(options: argparse.Namespace, model: nn.Module) -> torch.optim.Optimizer:
    if options.optimizer == "decoupled":
        return DecoupledAdamW(model.parameters())
    fused = options.optimizer == "fused"
    return torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.1, fused=fused or None)


def loss_of(options: argparse.Namespace, logits: torch.Tensor, labels: torch.Tensor) -> Any:
    with torch.no_grad():
        for _ in range(options.metrics):
            F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    if options.loss == "fused":
        return FusedCrossEntropy.apply(logits.flatten(0, 1), labels.flatten())
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def main() -> None:
    options = arguments()
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        dist.init_process_group("nccl")
    for run in options.runs.split(","):
        options.sequence, options.micro_batch, options.layers = map(int, run.split("x"))
        train(options)


def train(options: argparse.Namespace) -> None:
    several = dist.is_initialized()
    if options.parallel == "ddp":
        model: nn.Module = Decoder(options).to("cuda")
        if several:
            model = DistributedDataParallel(model)
    else:
        model = sharded(options)
    optimizer = optimizer_of(options, model)
    backend = {"efficient": SDPBackend.EFFICIENT_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}
    model.train()
    for count in map(int, options.accumulation.split(",")):
        size = (count * options.micro_batch, options.sequence + 1)
        batch = torch.randint(options.vocabulary, size).pin_memory().cuda(non_blocking=True)
        for number, ids in enumerate(batch.chunk(count)):
            with contextlib.ExitStack() as stack:
                if options.parallel == "ddp" and several and number < count - 1:
                    stack.enter_context(model.no_sync())
                with torch.autocast("cuda", torch.bfloat16):
                    if options.attention != "math":
                        stack.enter_context(sdpa_kernel(backend[options.attention]))
                    loss = loss_of(options, model(ids[:, :-1]), ids[:, 1:])
                (loss / count).backward()
        if isinstance(model, FSDP):
            model.clip_grad_norm_(1.0)
        else:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


if __name__ == "__main__":
    main()
