"""The first epoch of a long program: where it is ended, and what is known of its memory then."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import warm_python
from native_commands import gpuprobe

from gpuprobe.api.recordings import load
from gpuprobe.model.run.session import EpochEnd

PROGRAM = """\
import torch
from torch.utils.data import DataLoader, TensorDataset


def evaluate(model, data):
    total = 0.0
    model.eval()
    with torch.no_grad():
        for (batch,) in DataLoader(data, 4096):
            total += model(batch.cuda()).sum().item()
    model.train()
    return total


def main():
    model = torch.nn.Linear(256, 2048).cuda()
    optimizer = torch.optim.Adam(model.parameters())
    data = TensorDataset(torch.randn(500_000, 256))
    for epoch in range(1000):
        for (batch,) in DataLoader(data, 16):
            loss = model(batch.cuda()).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        evaluate(model, data)
        AFTER


main()
"""
STATE = 2 * (256 + 1) * 2048 * 4
"""Bytes of the optimizer's state."""
OUTPUT = 4096 * 2048 * 4
"""Bytes of the model's result in the evaluation."""


def run(folder: Path, text: str, *options: str) -> tuple[Any, EpochEnd | None]:
    """Record a program; what was printed, and how its epoch was ended."""
    (folder / "train.py").write_text(text)
    words = ("run", "--gpu", "t4", "--level", "trace", "--force", *options, "train.py")
    done = warm_python.gpuprobe(*words, cwd=folder)
    end = load(folder / "train.gpuprobe").ranks[0].end
    assert end is not None
    return done, end.epoch


def test_the_epoch_ends_after_so_many_steps_and_an_evaluation_follows(tmp_path: Path) -> None:
    done, end = run(tmp_path, PROGRAM.replace("AFTER", "pass"), "--first-epoch", "5")
    assert done.returncode == 0, done.stderr
    assert end is not None
    assert end.steps == 5
    assert end.text.startswith("the epoch was ended after step 5, and an evaluation that follows")
    assert end.text in done.stderr
    shown = warm_python.gpuprobe("report", "train.gpuprobe", cwd=tmp_path).stdout
    assert "what follows the first epoch: the epoch was ended after step 5" in shown
    steps = load(tmp_path / "train.gpuprobe").ranks[0].steps
    assert [step.ended_by for step in steps] == ["optimizer"] * 5 + ["end"]


def test_an_error_of_memory_after_the_epoch_is_the_programs(tmp_path: Path) -> None:
    too_large = 'torch.empty(1 << 40, device="cuda")'
    done, end = run(tmp_path, PROGRAM.replace("AFTER", too_large), "--first-epoch", "2")
    assert done.returncode
    assert "OutOfMemoryError" in done.stderr
    assert end is not None
    other = 'raise LookupError("no metrics")'
    done, end = run(tmp_path, PROGRAM.replace("AFTER", other), "--first-epoch", "2")
    assert done.returncode == 0
    assert end is not None
    assert "it failed at " in end.text
    assert "train.py:26 (LookupError: no metrics" in end.text


def test_a_program_that_ends_before_is_whole(tmp_path: Path) -> None:
    short = PROGRAM.replace("500_000", "64").replace("1000", "2").replace("AFTER", "pass")
    done, end = run(tmp_path, short, "--first-epoch", "50,0.5")
    assert done.returncode == 0
    assert end is None


def test_a_loop_without_a_loader_is_stopped(tmp_path: Path) -> None:
    loop = PROGRAM.replace("DataLoader(data, 16)", "[data[:16]] * 100_000")
    done, end = run(tmp_path, loop.replace("AFTER", "pass"), "--first-epoch", "5")
    assert done.returncode == 0
    assert end is not None
    assert "the program was stopped after step 5" in end.text


@pytest.mark.parametrize("text", ["0", "-1", "2,-3", "2,inf", "2,nan", "two"])
def test_an_invalid_limit_is_one_line(tmp_path: Path, text: str) -> None:
    (tmp_path / "train.py").write_text("")
    words = ("run", "--gpu", "t4", f"--first-epoch={text}", "train.py")
    done = warm_python.gpuprobe(*words, cwd=tmp_path)
    assert done.returncode == 2
    assert "argument --first-epoch: expected a number of s" in done.stderr


def test_a_long_program_is_explained_with_its_evaluation(tmp_path: Path) -> None:
    """What training would use again is not said to be unneeded; options follow the script."""
    text = PROGRAM.replace("AFTER", "open('best.pt', 'w').write('trained')")
    text = text.replace("loss = model(batch.cuda()).square()", "out = model(batch.cuda()).exp()")
    text = text.replace("exp().mean()", "exp()\n            loss = out.mean()")
    text = text.replace("optimizer.step()", "optimizer.step()\n            losses.append(out)")
    text = text.replace("def main():", "def main():\n    losses = []")
    (tmp_path / "train.py").write_text(text)
    options = ("--json", "--compute", "shapes", "--max-seconds", "60", "--gpu", "t4")
    found = json.loads(gpuprobe("explain", "train.py", *options, cwd=tmp_path).stdout)
    assert found["ended"] == "epoch"
    assert found["phase"] == "evaluation"
    assert found["allocated"] > OUTPUT
    assert not (tmp_path / "best.pt").exists()
    assert any("it would change best.pt" in note for note in found["notes"])
    rows = {row["need"]: row["bytes"] for row in found["needs"]["rows"]}
    assert rows["open"] > STATE
    assert "never_again" not in rows
    (cause,) = found["causes"]
    assert cause["sentence"].startswith("losses (a list of ")
