"""A small training script, and how a test measures it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import warm_python

from gpuprobe.analysis.baseline.model import Baseline
from gpuprobe.gate.files import read_baseline
from gpuprobe.gate.sources import with_text

PROGRAM = """\
import torch
from torch import nn

torch.manual_seed(0)
layers = [nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 8)]
model = nn.Sequential(*layers).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
other = torch.cuda.stream(torch.cuda.Stream())
scores = torch.zeros(1024, device="cuda")
kept = []
scratch = torch.empty(30 << 20, dtype=torch.uint8, device="cuda")
del scratch
for step in range(6):
    # before
    x = torch.randn(4096, 256, device="cuda")
    loss = model(x).square().mean()
    loss.backward()
    del x
    optimizer.step()
    optimizer.zero_grad()
    # after
with torch.no_grad():
    for _ in range(2):
        model(torch.randn(4096, 256, device="cuda"))
"""


KEPT_WORKSPACES = {"TORCH_CUBLAS_WORKSPACE_CACHE": "1"}
"""Environment that keeps cuBLAS's, as before torch 2.15: figures are those of each version."""


def measured(folder: Path, *edits: tuple[str, str], options: Sequence[str] = ()) -> Baseline:
    """What the program, with these replacements, needs on a simulated GPU. It has its own process:
    libraries keep workspaces, which a second program of a process would not allocate again.
    """
    text = PROGRAM
    for old, new in edits:
        assert old in text, old
        text = text.replace(old, new)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "train.py").write_text(text, encoding="utf-8")
    update = ("baseline", "update", "train.py", "--gpu", "a100-40gb", "--baseline", "b.json")
    done = warm_python.gpuprobe(*update, *options, cwd=folder, environment=KEPT_WORKSPACES)
    assert done.returncode == 0, done.stderr
    found = read_baseline(folder / "b.json")
    return replace(found, sources=with_text(found.sources, str(folder)))
