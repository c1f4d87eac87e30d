"""A small script, recordings of it, and their baselines; made once for all tests here."""

from __future__ import annotations

from pathlib import Path

import pytest
import warm_python

SCRIPT = """\
import sys
import torch

width = int(sys.argv[1])
model = torch.nn.Linear(width, width).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    model(torch.ones(32, width, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


OTHER = """\
import sys
import torch

names = {"one": ("stem", "body", "head"), "two": ("embed", "mix", "out")}[sys.argv[1]]
sizes = [256, 256, 256, 256] if sys.argv[1] == "one" else [256, 128, 96, 64]
parts = [torch.nn.Linear(*pair) for pair in zip(sizes, sizes[1:])]
model = torch.nn.Sequential()
for name, part in zip(names, parts):
    model.add_module(name, part)
model = model.cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    model(torch.ones(32, 256, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""

_made: list[Path] = []


def made(factory: pytest.TempPathFactory) -> Path:
    """A folder with the script, recordings of a small and a large model, and their baselines:
    ``train.py``, ``small.gpuprobe``, ``large.gpuprobe``, ``small.json``, ``large.json``; and the
    same of two models of another script, ``one`` and ``two``.
    """
    if _made:
        return _made[0]
    folder = factory.mktemp("made")
    (folder / "train.py").write_text(SCRIPT, encoding="utf-8")
    (folder / "other.py").write_text(OTHER, encoding="utf-8")
    for name, script, word in (
        ("small", "train.py", "256"),
        ("large", "train.py", "1024"),
        ("one", "other.py", "one"),
        ("two", "other.py", "two"),
    ):
        run = ["run", "-q", "--level", "trace", "--gpu", "t4", "-o", f"{name}.gpuprobe"]
        update = ["baseline", "update", f"{name}.gpuprobe", "--baseline", f"{name}.json"]
        for command in ([*run, script, word], update):
            done = warm_python.gpuprobe(*command, cwd=folder)
            assert done.returncode == 0, done.stderr
    _made.append(folder)
    return folder


def copied(folder: Path, to: Path) -> None:
    """Give another folder the same things, and ``memory.json``, the small model's baseline."""
    for item in folder.iterdir():
        (to / item.name).symlink_to(item)
    (to / "memory.json").write_bytes((folder / "small.json").read_bytes())
