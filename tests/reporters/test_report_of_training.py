"""A real training run, recorded and reported: the report agrees with itself and the program."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import warm_python

from gpuprobe.reporters.json.schemas import schema

pytest.importorskip("torch", reason="torch is not installed")

SCRIPT = """
import torch

torch.manual_seed(0)
model = torch.nn.Sequential(
    torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 64)
)
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(4):
    loss = model(torch.randn(512, 64)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
PARAMETERS = 4 * (64 * 256 + 256 + 256 * 64 + 64)


def gpuprobe(*arguments: str, cwd: Path) -> str:
    done = warm_python.gpuprobe(*arguments, cwd=cwd)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module", params=["trace", "counters"])
def recorded(request: pytest.FixtureRequest, tmp_path_factory: Any) -> tuple[Path, str]:
    folder: Path = tmp_path_factory.mktemp(request.param)
    (folder / "train.py").write_text(SCRIPT)
    gpuprobe("run", "--level", request.param, "-o", "a.gpuprobe", "-q", "train.py", cwd=folder)
    return folder, request.param


def test_the_report_agrees_with_itself_and_the_program(recorded: tuple[Path, str]) -> None:
    folder, level = recorded
    report = json.loads(gpuprobe("report", "a.gpuprobe", "--json", cwd=folder))
    jsonschema.Draft202012Validator(schema("report-2")).validate(report)
    assert report["recording"]["status"] == "complete"
    assert report["peak"]["step"] is not None
    assert report["peak"]["phase"]
    categories = {row["key"]: row["bytes"] for row in report["categories"]["rows"]}
    assert categories["parameter"] == PARAMETERS
    # Two moments, and a step counter for each of the four parameters.
    assert categories["optimizer_state"] == pytest.approx(2 * PARAMETERS, abs=4 * 8)
    if level == "trace":
        # The account of windows, and that of single blocks, are made independently.
        assert report["peak"]["allocated"]["at_least"] == report["peak"]["traced"]
        assert report["categories"]["total"] == report["peak"]["traced"]
        assert any(row["file"].endswith("train.py") for row in report["top_lines"]["rows"][:3])


def test_the_text_names_what_the_user_needs(recorded: tuple[Path, str]) -> None:
    folder, level = recorded
    text = gpuprobe("report", "a.gpuprobe", cwd=folder)
    assert max(map(len, text.splitlines())) <= 80
    assert "optimizer state" in text
    assert "in phase " in text
    assert ("train.py:" in text) == (level == "trace")
