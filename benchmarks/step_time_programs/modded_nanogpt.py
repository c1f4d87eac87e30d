"""A training step of modded-nanogpt's records of October and November 2024, compiled.

Written after their descriptions, not their code: GPT-2 small with rotary positions, RMS norms, no
biases, logits in float32; weights in float32 under autocast to bfloat16; DistributedDataParallel;
AdamW for the embedding, Muon for matrices: momentum, then five steps of Newton and Schulz in
bfloat16, compiled, on every rank or divided among the ranks with an all-reduce of the result.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.parallel import DistributedDataParallel

BACKENDS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    for name, size in (("width", 768), ("heads", 6), ("vocabulary", 50304)):
        parser.add_argument(f"--{name}", type=int, default=size)
    parser.add_argument(
        "--modern", action="store_true", help="norms of queries and keys, ReLU squared"
    )
    parser.add_argument("--untied", action="store_true")
    parser.add_argument("--divided", action="store_true", help="Muon among the ranks")
    parser.add_argument("--attention", choices=BACKENDS, default="flash")
    parser.add_argument("--runs", default="1024x64x12", help="sequence, micro-batch, layers")
    parser.add_argument("--accumulation", default="1,1")
    return parser.parse_args()


def norm(x: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(x, (x.size(-1),))


def rotated(x: torch.Tensor) -> torch.Tensor:
    length, size = x.shape[1], x.shape[3]
    turns = 1 / 10000 ** (torch.arange(0, size, 2, device=x.device).float() / size)
    angles = torch.outer(torch.arange(length, device=x.device).float(), turns)
    cos, sin = (each.bfloat16()[None, :, None, :] for each in (angles.cos(), angles.sin()))
    first, second = x.chunk(2, dim=3)
    turned = (first * cos + second * sin, second * cos - first * sin)
    return torch.cat(turned, 3).type_as(x)


class Block(nn.Module):
    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__()
        width = options.width
        self.heads, self.modern = options.heads, options.modern
        self.backend = BACKENDS[options.attention]
        self.query, self.key, self.value, self.out = (
            nn.Linear(width, width, bias=False) for _ in range(4)
        )
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(norm(x))
        y = self.up(norm(x))
        return x + self.down(F.relu(y).square() if self.modern else F.gelu(y))

    def attention(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        query, key, value = (
            each(x).view(batch, length, self.heads, -1)
            for each in (self.query, self.key, self.value)
        )
        if self.modern:
            query, key = norm(query), norm(key)
        query, key = rotated(query), rotated(key)
        parts = (each.transpose(1, 2) for each in (query, key, value))
        y = F.scaled_dot_product_attention(*parts, is_causal=True)
        return self.out(y.transpose(1, 2).contiguous().view(batch, length, width))


class Gpt(nn.Module):
    def __init__(self, options: argparse.Namespace, layers: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(options.vocabulary, options.width)
        self.blocks = nn.ModuleList([Block(options) for _ in range(layers)])
        self.head = nn.Linear(options.width, options.vocabulary, bias=False)
        if not options.untied:
            self.head.weight = self.tokens.weight

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x)
        logits = self.head(norm(x)).float()
        return F.cross_entropy(logits.view(-1, logits.size(-1)), labels.view(-1))


@torch.compile
def orthogonal(gradient: torch.Tensor) -> torch.Tensor:
    x = gradient.bfloat16()
    x = x / (x.norm() + 1e-7)
    tall = x.size(0) > x.size(1)
    x = x.T if tall else x
    for _ in range(5):
        product = x @ x.T
        polynomial = -4.775 * product + 2.0315 * product @ product
        x = 3.4445 * x + polynomial @ x
    return x.T if tall else x


class Muon(torch.optim.Optimizer):
    def __init__(self, parameters: list[nn.Parameter], divided: bool) -> None:
        super().__init__(parameters, {"lr": 0.02, "momentum": 0.95})
        self.divided = divided

    @torch.no_grad()
    def step(self, closure: object = None) -> None:
        ranks, rank = dist.get_world_size(), dist.get_rank()
        for group in self.param_groups:
            parameters = group["params"]
            total = sum(each.numel() for each in parameters)
            flat = torch.zeros(total, device="cuda", dtype=torch.bfloat16) if self.divided else None
            at = 0
            for number, parameter in enumerate(parameters):
                if flat is None or number % ranks == rank:
                    update = self.update(parameter, group["momentum"])
                    if flat is None:
                        parameter.add_(update.type_as(parameter), alpha=-group["lr"])
                    else:
                        flat[at : at + parameter.numel()] = update.flatten()
                at += parameter.numel()
            if flat is not None:
                dist.all_reduce(flat)
                at = 0
                for parameter in parameters:
                    part = flat[at : at + parameter.numel()].view_as(parameter)
                    parameter.add_(part.type_as(parameter), alpha=-group["lr"])
                    at += parameter.numel()

    def update(self, parameter: nn.Parameter, momentum: float) -> torch.Tensor:
        state = self.state[parameter]
        if "buffer" not in state:
            state["buffer"] = torch.zeros_like(parameter)
        buffer = state["buffer"]
        buffer.mul_(momentum).add_(parameter.grad)
        update = orthogonal(parameter.grad.add(buffer, alpha=momentum))
        return update * max(1, update.size(0) / update.size(1)) ** 0.5


def main() -> None:
    options = arguments()
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group("nccl")
    for run in options.runs.split(","):
        torch._dynamo.reset()
        sequence, batch, layers = map(int, run.split("x"))
        train(options, sequence, batch, layers)


def train(options: argparse.Namespace, sequence: int, batch: int, layers: int) -> None:
    plain = Gpt(options, layers).cuda()
    model = DistributedDataParallel(torch.compile(plain))
    heads = [plain.head.weight] + [plain.tokens.weight] * options.untied
    adam = torch.optim.AdamW(heads, lr=3e-4, betas=(0.9, 0.95), fused=True)
    muon = Muon([each for each in plain.blocks.parameters() if each.ndim == 2], options.divided)
    for _ in options.accumulation.split(","):
        ids = torch.randint(options.vocabulary, (batch, sequence + 1)).cuda()
        with torch.autocast("cuda", torch.bfloat16), sdpa_kernel(BACKENDS[options.attention]):
            loss = model(ids[:, :-1].contiguous(), ids[:, 1:].contiguous())
            loss.backward()
        muon.step()
        adam.step()
        model.zero_grad(set_to_none=True)


if __name__ == "__main__":
    main()
