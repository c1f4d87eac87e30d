"""A baseline is the same bytes, wherever and however often it is made."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

PROJECT = """\
[tool.gpuprobe]
gpu = "h100-80gb"
run = "train.py"
baseline = "memory.json"
"""

SCRIPT = """\
import os
import random
import tempfile
import threading

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

WIDTH = 128


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, depth=3):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.heads = nn.ModuleDict({name: nn.Linear(WIDTH, 8) for name in ("a", "b", "c")})

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        # The order of a set of strings depends on the hash seed.
        return sum(self.heads[name](x) for name in set(self.heads))


def evaluate(model, loader):
    model.eval()
    with torch.no_grad():
        found = [model(x.cuda()).mean() for (x,) in loader]
    model.train()
    return torch.stack(found).mean()


def main():
    torch.manual_seed(0)
    data = torch.utils.data.TensorDataset(torch.randn(96, WIDTH))
    loader = torch.utils.data.DataLoader(data, batch_size=32, shuffle=True, pin_memory=True)
    model = Net().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    side = torch.cuda.Stream()
    names = {f"name {number}" for number in range(20)}
    for epoch in range(2):
        for (x,) in loader:
            x = x.cuda(non_blocking=True)
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = model(x).float().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            cache = {name: torch.empty(len(name), device="cuda") for name in names}
            del cache
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            evaluate(model, loader)
        torch.cuda.current_stream().wait_stream(side)
    tempfile.mkdtemp()


main()
"""

LOCALES = ("C", "C.UTF-8", "POSIX")


def baseline(folder: Path, number: int) -> bytes:
    """The baseline that one run writes: in another folder each time, with another hash seed,
    temporary folder, locale and number of threads."""
    project = folder / f"run {number}" / ("deeper/" * (number % 3)) / f"project-{number}"
    (project / "ci").mkdir(parents=True)
    (project / "pyproject.toml").write_text(PROJECT, encoding="utf-8")
    (project / "train.py").write_text(SCRIPT, encoding="utf-8")
    scratch = folder / f"scratch {number}"
    scratch.mkdir()
    environment = {
        # Of the home folder of this process: else each run compiles the simulated GPU.
        "XDG_CACHE_HOME": str(Path.home() / ".cache"),
        **os.environ,
        "PYTHONHASHSEED": str(number * 101),
        "TMPDIR": str(scratch),
        "HOME": str(scratch),
        "LC_ALL": LOCALES[number % len(LOCALES)],
        "OMP_NUM_THREADS": str(1 + number % 2),
        "OMP_WAIT_POLICY": "passive",  # threads that wait for each other sleep
    }
    done = subprocess.run(
        [sys.executable, "-m", "gpuprobe", "baseline", "update", "--hazards"],
        cwd=project / "ci" if number % 2 else project,
        env=environment,
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return (project / "memory.json").read_bytes()


def test_two_runs_give_the_same_bytes(tmp_path: Path) -> None:
    assert baseline(tmp_path, 0) == baseline(tmp_path, 1)
