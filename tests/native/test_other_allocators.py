"""Commands on the native engine with another allocator."""

from __future__ import annotations

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
