"""What the programs of this folder share: where they run, and lines that do not mix."""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BACKEND = "nccl" if DEVICE == "cuda" else "gloo"


def join(backend=BACKEND):
    """Join the job; the rank, the number of ranks and this rank's device."""
    if DEVICE == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(backend)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    return (
        rank,
        ranks,
        torch.device(DEVICE, int(os.environ["LOCAL_RANK"]) if DEVICE == "cuda" else None),
    )


def show(*words):
    """Print one whole line, which begins with the rank."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    sys.stdout.write(f"rank {rank}: " + " ".join(map(str, words)) + "\n")
    sys.stdout.flush()


def number(value):
    return f"{float(value):.5g}"


def numbers(tensor):
    return [float(number(value)) for value in tensor.detach().flatten().tolist()]


def rows(count, width, seed):
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed))


def network(seed=0, inner=16, norm=False):
    torch.manual_seed(seed)
    middle = [nn.BatchNorm1d(inner)] if norm else []
    return nn.Sequential(nn.Linear(8, inner), *middle, nn.Tanh(), nn.Linear(inner, 1))
