"""Peaks that PyTorch's tutorials print, and ours of the same programs, without a GPU.

``ZeroRedundancyOptimizer``, 20 linear layers of 2000 features on two GPUs, Adam in 32 bits: what
"Shard Optimizer States with ZeroRedundancyOptimizer" prints on rank 0, in whole MB of 10**6 bytes
(https://pytorch.org/tutorials/recipes/zero_redundancy_optimizer.html, of 2021-02-26 for PyTorch
1.8, last changed 2021-10-20). The program is rewritten from the page, with the Adam of that
time, which has no ``foreach``. Figures that differ come from a torch that is five years older.

    python benchmarks/tutorial_peaks.py
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import native_start

if __name__ == "__main__":
    native_start.restart("2xa100-40gb")

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

PRINTED = {
    True: {"local model": 335, "DDP": 656, "before step()": 992, "after step()": 1361},
    False: {"local model": 335, "DDP": 656, "before step()": 992, "after step()": 1697},
}
"""After each stage, with ``ZeroRedundancyOptimizer`` and without it."""

WIDTH, LAYERS, BATCH = 2000, 20, 20


def train(rank: int, ranks: int, sharded: bool, meeting: str, out: str) -> None:
    """One step, on one of the GPUs."""
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=ranks)
    peaks = {}
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH).to(rank) for _ in range(LAYERS)))
    peaks["local model"] = torch.cuda.max_memory_allocated(rank)
    parallel = DistributedDataParallel(model, device_ids=[rank])
    peaks["DDP"] = torch.cuda.max_memory_allocated(rank)
    parameters = list(parallel.parameters())
    optimizer: torch.optim.Optimizer
    if sharded:
        optimizer = ZeroRedundancyOptimizer(
            parameters, optimizer_class=torch.optim.Adam, lr=0.01, foreach=False
        )
    else:
        optimizer = torch.optim.Adam(parameters, lr=0.01, foreach=False)
    outputs = parallel(torch.randn(BATCH, WIDTH).to(rank))
    labels = torch.randn(BATCH, WIDTH).to(rank)
    nn.MSELoss()(outputs, labels).backward()
    peaks["before step()"] = torch.cuda.max_memory_allocated(rank)
    optimizer.step()
    peaks["after step()"] = torch.cuda.max_memory_allocated(rank)
    if rank == 0:
        Path(out).write_text(json.dumps(peaks))
    dist.destroy_process_group()


def measured(sharded: bool, ranks: int = 2) -> dict[str, int]:
    """Peaks on rank 0, in bytes."""
    with tempfile.TemporaryDirectory() as folder:
        out, meeting = (str(Path(folder) / name) for name in ("peaks.json", "meeting"))
        mp.spawn(train, args=(ranks, sharded, meeting, out), nprocs=ranks)
        found: dict[str, int] = json.loads(Path(out).read_text())
        return found


def main() -> None:
    print(f"{'optimizer':24} {'peak after':16} {'printed':>8} {'ours':>8}")
    for sharded, printed in PRINTED.items():
        ours = measured(sharded)
        for stage, theirs in printed.items():
            name = "ZeroRedundancyOptimizer" if sharded else "Adam"
            mark = (
                "" if theirs == ours[stage] // 10**6 else f"  {ours[stage] / 1e6 / theirs - 1:+.2%}"
            )
            print(f"{name:24} {stage:16} {theirs:5} MB {ours[stage] // 10**6:5} MB{mark}")


if __name__ == "__main__":
    sys.exit(main())
