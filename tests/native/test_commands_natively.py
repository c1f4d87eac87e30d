"""Programs whose allocator keeps no history run under ``gpuprobe run`` as they do without it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from parity_account import environment

import gpuprobe

pytestmark = [pytest.mark.native, pytest.mark.slow]

TRAINS = """\
import torch

print(torch.cuda.get_allocator_backend())
model = torch.nn.Linear(512, 512).cuda()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(3):
    model(torch.randn(8, 512, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
FAILS = False
if FAILS:
    torch.empty(2**50, device="cuda")
"""


@pytest.mark.parametrize("fails", [False, True])
def test_a_trace_leaves_another_allocator_alone(fails: bool, tmp_path: Path) -> None:
    text = TRAINS.replace("FAILS = False", f"FAILS = {fails}")
    (tmp_path / "program.py").write_text(text, encoding="utf-8")
    options = ["--gpu", "h100-80gb", "--engine", "native", "--level", "trace", "-o", "run.gpuprobe"]
    done = subprocess.run(
        [sys.executable, "-m", "gpuprobe", "run", *options, "program.py"],
        cwd=tmp_path,
        env={**environment(), "PYTORCH_ALLOC_CONF": "backend:cudaMallocAsync"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "cudaMallocAsync\n"
    assert ("OutOfMemoryError" in done.stderr) is fails, done.stderr
    assert bool(done.returncode) is fails
    assert "stopped recording" not in done.stderr
    (rank,) = gpuprobe.load(tmp_path / "run.gpuprobe").ranks
    assert [step.ended_by for step in rank.steps][:3] == ["optimizer"] * 3
    assert any("another allocator" in spot.what for spot in rank.blind_spots)
