"""A small training script, and how a test measures one in this process."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpuprobe.analysis.baseline import Baseline
from gpuprobe.api.check import measure

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


def measured(
    folder: Path, patch: pytest.MonkeyPatch, *edits: tuple[str, str], hazards: bool = False
) -> Baseline:
    """What the program, with these replacements, takes on a virtual GPU."""
    text = PROGRAM
    for old, new in edits:
        assert old in text, old
        text = text.replace(old, new)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "train.py").write_text(text, encoding="utf-8")
    patch.chdir(folder)
    return measure("train.py", gpu="a100-40gb", hazards=hazards)
