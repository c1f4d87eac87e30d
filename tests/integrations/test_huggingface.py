"""The callback in a real Hugging Face Trainer."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch

import gpuprobe

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.xdist_group("huggingface"),  # so that one process imports transformers
]


@pytest.fixture(scope="module", autouse=True)
def installed() -> None:
    """Not at the import of this module, which each process would do: that takes 7 s."""
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")


def trained(folder: Path, callbacks: list[Any], **options: Any) -> list[float]:
    import transformers

    class Losses(transformers.TrainerCallback):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            self.found: list[float] = []

        def on_log(self, args: Any, state: Any, control: Any, logs: Any, **kwargs: Any) -> None:
            if "loss" in logs:
                self.found.append(float(logs["loss"]))

    torch.manual_seed(3)
    config = transformers.GPT2Config(vocab_size=64, n_positions=16, n_embd=16, n_layer=1, n_head=2)
    rows = [{"input_ids": torch.arange(8), "labels": torch.arange(8)} for _ in range(16)]
    losses = Losses()
    trainer = transformers.Trainer(
        model=transformers.GPT2LMHeadModel(config),
        args=transformers.TrainingArguments(
            output_dir=str(folder / "out"),
            max_steps=4,
            per_device_train_batch_size=2,
            report_to=[],
            save_strategy="no",
            use_cpu=True,
            disable_tqdm=True,
            logging_steps=1,
            **options,
        ),
        train_dataset=rows,
        callbacks=[losses, *callbacks],
    )
    trainer.train()
    return losses.found


@pytest.mark.parametrize("level", ["counters", "trace"])
def test_a_training_is_recorded_and_computes_the_same(tmp_path: Path, level: str) -> None:
    from gpuprobe.integrations.huggingface import MemoryCallback

    path = tmp_path / "run.gpuprobe"
    expected = trained(tmp_path, [], gradient_accumulation_steps=2)
    assert len(expected) == 4
    callback = MemoryCallback(path, level)
    assert trained(tmp_path, [callback], gradient_accumulation_steps=2) == expected
    (rank,) = gpuprobe.load(path).ranks
    assert rank.end is not None
    assert (rank.end.error, rank.end.gpuprobe_faults) == (None, ())
    steps = [step for step in rank.steps if step.ended_by == "optimizer"]
    assert len(steps) == 4
    for step in steps:
        entries = {phase.path: phase.entries for phase in step.phases}
        assert (entries["forward"], entries["backward"], entries["optimizer"]) == (2, 2, 1)
    placed = {row["kind"] for row in gpuprobe.report(gpuprobe.load(path))["placement"]}
    assert "GPT2LMHeadModel" in placed


def test_a_training_that_fails_ends_its_recording_with_the_next(tmp_path: Path) -> None:
    import transformers

    from gpuprobe.integrations.huggingface import MemoryCallback

    class Fails(transformers.TrainerCallback):  # type: ignore[misc,name-defined]
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 2:
                raise KeyError("in a callback")

    callback = MemoryCallback(tmp_path / "run.gpuprobe", force=True)
    with pytest.raises(KeyError, match="in a callback"):
        trained(tmp_path, [callback, Fails()])
    for _ in range(6000):  # the recorder's thread writes the second step
        (rank,) = gpuprobe.load(tmp_path / "run.gpuprobe").ranks
        if len(rank.steps) == 2:
            break
        time.sleep(0.01)
    assert (len(rank.steps), rank.end) == (2, None)
    trained(tmp_path, [callback])
    (rank,) = gpuprobe.load(tmp_path / "run.gpuprobe").ranks
    assert rank.end is not None
    assert len([step for step in rank.steps if step.ended_by == "optimizer"]) == 4
