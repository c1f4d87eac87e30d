"""The decorator for a step function, and how a callback's recording begins and ends."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import gpuprobe
from gpuprobe.errors import MissingExtra, UsageError
from gpuprobe.integrations.steps import TrainingRecording


def test_every_call_is_a_step(tmp_path: Path) -> None:
    net = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)

    @gpuprobe.watch_steps(tmp_path / "run.gpuprobe")
    def train_step(x: torch.Tensor, *, scale: float = 1.0) -> float:
        """One step."""
        optimizer.zero_grad()
        loss = net(x).square().mean() * scale
        loss.backward()
        optimizer.step()
        return loss.item()

    assert train_step.__doc__ == "One step."
    assert not (tmp_path / "run.gpuprobe").exists()
    losses = [train_step(torch.ones(3, 4), scale=2.0) for _ in range(3)]
    assert losses == sorted(losses, reverse=True)
    train_step.finish()  # type: ignore[attr-defined]
    (rank,) = gpuprobe.load(tmp_path / "run.gpuprobe").ranks
    assert [step.ended_by for step in rank.steps] == ["user"] * 3
    assert rank.end is not None
    with pytest.raises(UsageError, match="exists already"):
        train_step(torch.ones(3, 4))


def test_a_step_that_raises_ends_and_the_next_goes_on(tmp_path: Path) -> None:
    @gpuprobe.watch_steps(tmp_path / "run.gpuprobe")
    def train_step(fail: bool) -> None:
        torch.ones(3).sum()
        if fail:
            raise KeyError("mine")

    train_step(False)
    with pytest.raises(KeyError, match="mine"):
        train_step(True)
    train_step(False)
    train_step.finish()  # type: ignore[attr-defined]
    assert len(gpuprobe.load(tmp_path / "run.gpuprobe").steps) == 3


def test_the_process_ends_the_recording(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import torch, gpuprobe\n"
        "@gpuprobe.watch_steps('run.gpuprobe')\n"
        "def step():\n"
        "    return torch.ones(3).sum().item()\n"
        "step(); print(step())\n"
    )
    done = subprocess.run(
        [sys.executable, str(program)], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout == "3.0\n"
    (rank,) = gpuprobe.load(tmp_path / "run.gpuprobe").ranks
    assert len(rank.steps) == 2
    assert rank.end is not None


def test_ranks_that_only_a_library_knows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    run = TrainingRecording(tmp_path / "run.gpuprobe", "run")
    run.start(ranks=(1, 1, 2))
    assert "RANK" not in os.environ
    run.finish()
    run.start(ranks=(0, 0, 2))
    run.finish()
    run.finish()
    ranks = gpuprobe.load(tmp_path / "run.gpuprobe").ranks
    assert [(r.session.rank, r.session.world_size) for r in ranks] == [(0, 2), (1, 2)]


@pytest.mark.parametrize(
    ("module", "package"), [("lightning", "lightning"), ("huggingface", "transformers")]
)
def test_a_missing_library_is_named(
    module: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import importlib
    import importlib.util

    real = importlib.util.find_spec
    absent = ("lightning", "pytorch_lightning", "transformers")
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *rest: None if name in absent else real(name, *rest),
    )
    monkeypatch.delitem(sys.modules, f"gpuprobe.integrations.{module}", raising=False)
    with pytest.raises(MissingExtra, match=f"{package} is not installed") as caught:
        importlib.import_module(f"gpuprobe.integrations.{module}")
    assert caught.value.hint == f"pip install 'gpuprobe[{module}]'"
