"""Sharded training without a cluster: one rank of several, with nobody to talk to."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

dist.init_process_group("nccl")
blocks = [nn.Sequential(nn.Linear(512, 2048), nn.ReLU(), nn.Linear(2048, 512)) for _ in range(8)]
model = nn.Sequential(*blocks).cuda()
for block in model:
    fully_shard(block)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(4):
    optimizer.zero_grad()
    model(torch.randn(4, 512, device="cuda")).pow(2).mean().backward()
    optimizer.step()
"""
BLOCK = 4 * (512 * 2048 * 2 + 2048 + 512)  # bytes of one block's parameters


@pytest.mark.parametrize("compute", ["shapes", "real"])
def test_fully_sharded(tmp_path: Path, compute: str) -> None:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    words = ["estimate", str(path), "--gpu", "t4", "--ranks", "8", "--json", "--compute", compute]
    done = subprocess.run(
        [sys.executable, "-m", "gpuprobe", *words], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["ranks"] == 8
    shard = 8 * BLOCK // 8
    # Parameters, gradients and two moments of an eighth; and whole blocks while they compute.
    assert 4 * shard < answer["peak_allocated"] - 16 * 2**20 < 4 * shard + 8 * BLOCK
    moments = next(
        row["bytes"] for row in answer["by_category"] if row["name"] == "optimizer_state"
    )
    assert 2 * shard <= moments <= 2 * shard * 1.05
