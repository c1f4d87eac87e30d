"""The callback in a real Lightning Trainer."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

import gpuprobe
from gpuprobe.errors import UsageError

if "GPUPROBE_TEST_INTEGRATIONS" not in os.environ:
    # Its import sets variables of the environment, which each process of other tests would have.
    pytest.skip("make test-integrations", allow_module_level=True)
pl: Any = pytest.importorskip("lightning.pytorch")
pytestmark = pytest.mark.filterwarnings("ignore")


class Model(pl.LightningModule):  # type: ignore[misc,name-defined]
    def __init__(self, fail_at: int = -1) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(
            torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 4)
        )
        self.losses: list[float] = []
        self.fail_at = fail_at

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        if index == self.fail_at:
            raise KeyError("in the training step")
        loss = self.net(batch).square().mean()
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: torch.Tensor, index: int) -> None:
        self.net(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


def fit(callbacks: list[Any], fail_at: int = -1, **options: Any) -> list[float]:
    torch.manual_seed(3)
    model = Model(fail_at)
    rows = list(torch.randn(32, 16, generator=torch.Generator().manual_seed(7)))
    loader = torch.utils.data.DataLoader(rows, batch_size=8)
    trainer = pl.Trainer(
        max_epochs=1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=callbacks,
        **options,
    )
    trainer.fit(model, loader, torch.utils.data.DataLoader(rows, batch_size=16))
    return model.losses


@pytest.mark.parametrize("level", ["counters", "trace"])
def test_a_fit_is_recorded_and_computes_the_same(tmp_path: Path, level: str) -> None:
    from gpuprobe.integrations.lightning import MemoryCallback

    path = tmp_path / "run.gpuprobe"
    assert fit([MemoryCallback(path, level)]) == fit([])
    recording = gpuprobe.load(path)
    (rank,) = recording.ranks
    assert rank.end is not None
    assert (rank.end.error, rank.end.gpuprobe_faults) == (None, ())
    steps = [step for step in rank.steps if step.ended_by == "optimizer"]
    assert len(steps) == 4
    for step in steps:
        paths = {phase.path for phase in step.phases}
        assert {"data", "optimizer", "optimizer/forward", "optimizer/backward"} <= paths
    report = gpuprobe.report(recording)
    assert "Model" in {row["name"] for row in report["placement"] if row["what"] == "module"}
    if level == "trace":
        assert {row["key"] for row in report["categories"]["rows"]} >= {"parameter", "gradient"}


def test_accumulated_gradients_are_one_step(tmp_path: Path) -> None:
    from gpuprobe.integrations.lightning import MemoryCallback

    fit([MemoryCallback(tmp_path / "run.gpuprobe")], accumulate_grad_batches=2)
    steps = gpuprobe.load(tmp_path / "run.gpuprobe").steps
    assert [step.ended_by for step in steps if step.ended_by != "end"] == ["optimizer"] * 2


def test_an_exception_passes_and_is_recorded(tmp_path: Path) -> None:
    from gpuprobe.integrations.lightning import MemoryCallback

    with pytest.raises(KeyError, match="in the training step"):
        fit([MemoryCallback(tmp_path / "run.gpuprobe")], fail_at=2)
    (rank,) = gpuprobe.load(tmp_path / "run.gpuprobe").ranks
    assert rank.end is not None
    assert rank.end.error is not None
    assert rank.end.error.type == "KeyError"


def test_a_recording_that_exists_is_not_overwritten(tmp_path: Path) -> None:
    from gpuprobe.integrations.lightning import MemoryCallback

    fit([MemoryCallback(tmp_path / "run.gpuprobe")])
    with pytest.raises(UsageError, match="exists already"):
        fit([MemoryCallback(tmp_path / "run.gpuprobe")])
    fit([MemoryCallback(tmp_path / "run.gpuprobe", force=True)])
