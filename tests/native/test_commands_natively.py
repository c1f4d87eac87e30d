"""Commands on the native engine: other allocators, and the causes of a failed check."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from native_commands import gpuprobe

from gpuprobe import load

pytestmark = pytest.mark.slow

TRAINS = """\
import torch

print(torch.cuda.get_allocator_backend())
model = torch.nn.Linear(512, 512).cuda()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(3):
    model(torch.randn(8, 512, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
torch.empty(2**50, device="cuda")
"""


def test_a_trace_leaves_another_allocator_alone(tmp_path: Path) -> None:
    """While it trains, and when it is out of memory."""
    (tmp_path / "program.py").write_text(TRAINS, encoding="utf-8")
    options = ["--gpu", "h100-80gb", "--level", "trace", "-o", "run.gpuprobe"]
    settings = {"PYTORCH_ALLOC_CONF": "backend:cudaMallocAsync"}
    done = gpuprobe("run", *options, "program.py", cwd=tmp_path, **settings)
    assert done.stdout == "cudaMallocAsync\n"
    assert "OutOfMemoryError" in done.stderr, done.stderr
    assert done.returncode
    assert "stopped recording" not in done.stderr
    (rank,) = load(tmp_path / "run.gpuprobe").ranks
    assert [step.ended_by for step in rank.steps][:3] == ["optimizer"] * 3
    assert any("another allocator" in spot.what for spot in rank.blind_spots)


MODEL = """\
import torch


@torch.no_grad()
def evaluate(model):
    x = torch.zeros(1024, 512, device="cuda")
    for _ in range(3):
        x = model(x).relu()
    return x.sum()
"""
CHECKED = """\
import torch

from model import evaluate

RATE = 0.1
model = torch.nn.Linear(512, 512).cuda()
optimizer = torch.optim.SGD(model.parameters(), RATE)
for _ in range(3):
    model(torch.randn(8, 512, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
evaluate(model)
"""


def test_a_check_tries_the_causes_on_the_same_engine(tmp_path: Path) -> None:
    """Each trial is a new process there: a process that has torch cannot load the engine."""
    (tmp_path / "model.py").write_text(MODEL, encoding="utf-8")
    (tmp_path / "train.py").write_text(CHECKED, encoding="utf-8")
    options = ("--gpu", "a100-40gb", "--baseline", "memory.json")
    done = gpuprobe("baseline", "update", *options, "train.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    baseline = json.loads((tmp_path / "memory.json").read_text(encoding="utf-8"))
    assert "simulated" in json.dumps(baseline["environment"])
    (tmp_path / "model.py").write_text(MODEL.replace("@torch.no_grad()\n", ""), encoding="utf-8")
    rate = CHECKED.replace("RATE = 0.1", "RATE = 0.2")
    (tmp_path / "train.py").write_text(rate, encoding="utf-8")
    done = gpuprobe("check", "--baseline", "memory.json", "--json", cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    document = json.loads(done.stdout)
    assert document["cause"].startswith(
        "reverting model.py:4 in evaluate (removed `@torch.no_grad()`) saves "
    )
    metric = next(row for row in document["metrics"] if row["name"] == "peak_allocated")
    assert metric["causes"][0]["saved"] == metric["delta"] > 0
    assert metric["unexplained"] == 0
    assert document["trials"] == ["1 run of the program with parts of its 2 changes reverted"]
