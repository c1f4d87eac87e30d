"""The paths that the architecture page describes are those that the code takes."""

from __future__ import annotations

from pathlib import Path

import pytest
import walks

from gpuprobe.cli import main
from gpuprobe.model.plans.estimate import Estimate
from gpuprobe.model.plans.request import EstimateRequest
from gpuprobe.native.measurement import EngineRun
from gpuprobe.native.session import EngineOptions
from gpuprobe.planning.figures import DeviceFit
from gpuprobe.planning.verdict import NeededMemory
from gpuprobe.sampler.program import Program

pytestmark = pytest.mark.simulated

TRAIN = """\
import torch

model = torch.nn.Linear(256, 256).cuda()
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(5):
    model(torch.randn(8, 256, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_the_path_of_an_estimate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "train.py"
    script.write_text(TRAIN)

    def estimate() -> None:
        assert main(["estimate", str(script), "--gpu", "t4"]) == 0

    followed = (
        EstimateRequest,
        Program,
        EngineOptions,
        EngineRun,
        DeviceFit,
        NeededMemory,
        Estimate,
    )
    found = walks.walk(estimate, *followed)
    assert "t4: fits" in capsys.readouterr().out
    assert walks.named("The path of an estimate") == found.path
    assert len(found.path) <= 14
