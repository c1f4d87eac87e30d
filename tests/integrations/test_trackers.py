"""The figures of a training in trackers of experiments, each with its real library, on a simulated
GPU. Those that the dev extra does not install: ``make test-integrations``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import gpuprobe

pytestmark = pytest.mark.xdist_group("huggingface")

MODEL = """\
import json, sys
import gpuprobe
virtual = gpuprobe.virtual_gpu("a100-40gb")
virtual.__enter__()
import torch
"""
TRAINER = (
    MODEL
    + """
import transformers
import gpuprobe.integrations.huggingface

config = transformers.GPT2Config(vocab_size=64, n_positions=16, n_embd=16, n_layer=1, n_head=2)
rows = [{"input_ids": torch.arange(8), "labels": torch.arange(8)} for _ in range(16)]
trainer = transformers.Trainer(
    model=transformers.GPT2LMHeadModel(config),
    args=transformers.TrainingArguments(
        output_dir="out", max_steps=3, report_to=["gpuprobe", *sys.argv[1:]], save_strategy="no",
        disable_tqdm=True, logging_steps=1,
    ),
    train_dataset=rows,
)
result = trainer.train().metrics
"""
)
TENSORBOARD = """
from glob import glob
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
events = EventAccumulator(glob("out/runs/*")[0]).Reload()
logged = {tag: events.Scalars(tag)[-1].value for tag in events.Tags()["scalars"]}
"""
WANDB = """
import wandb
logged = dict(wandb.run.summary)
"""
MLFLOW = """
import mlflow
logged = mlflow.last_active_run().data.metrics
"""
OUTPUT = """
print(json.dumps({name: value for name, value in logged.items() if "gpuprobe" in name}))
print(json.dumps({name: value for name, value in result.items() if "gpuprobe" in name}))
"""
VARIABLES = {
    "WANDB_MODE": "offline",
    "MLFLOW_TRACKING_URI": "file:runs",
    "MLFLOW_ALLOW_FILE_STORE": "true",
}


def needs(library: str) -> None:
    """Skip the test without it. Not imported here: some change the environment."""
    if find_spec(library) is None:
        pytest.skip(f"{library} is not installed: make test-integrations")


def run(folder: Path, program: str, *arguments: str) -> list[dict[str, Any]]:
    """The documents that a program prints."""
    (folder / "train.py").write_text(program)
    done = subprocess.run(
        [sys.executable, "train.py", *arguments],
        cwd=folder,
        env={**os.environ, **VARIABLES},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"')]
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize(
    ("tracker", "read"), [("tensorboard", TENSORBOARD), ("wandb", WANDB), ("mlflow", MLFLOW)]
)
def test_a_trainer_logs_them(tmp_path: Path, tracker: str, read: str) -> None:
    needs("accelerate")
    needs(tracker)
    logged, result = run(tmp_path, TRAINER + read + OUTPUT, tracker)
    (recording,) = tmp_path.glob("trainer*")
    expected = gpuprobe.metrics(recording)
    assert expected["gpuprobe/peak_allocated_bytes"] > 1 << 17
    assert expected["gpuprobe/steps"] == 3
    assert result == expected
    # Some trackers' callbacks put a prefix before the names.
    assert {name.removeprefix("train/"): value for name, value in logged.items()} == expected


def test_a_trainer_of_trl_logs_them(tmp_path: Path) -> None:
    needs("trl")
    program = (
        MODEL
        + """
import transformers
from datasets import Dataset
from trl import SFTConfig, SFTTrainer
import gpuprobe.integrations.huggingface

config = transformers.GPT2Config(vocab_size=64, n_positions=16, n_embd=16, n_layer=1, n_head=2)
from tokenizers import Tokenizer, models, pre_tokenizers
words = Tokenizer(models.WordLevel({"<pad>": 0, "<eos>": 1, "a": 2}, unk_token="<pad>"))
words.pre_tokenizer = pre_tokenizers.Whitespace()
trainer = SFTTrainer(
    model=transformers.GPT2LMHeadModel(config),
    args=SFTConfig(output_dir="out", max_steps=3, report_to=["gpuprobe", "tensorboard"],
                   save_strategy="no", disable_tqdm=True, logging_steps=1, max_length=8),
    train_dataset=Dataset.from_dict({"text": ["a a a a"] * 8}),
    processing_class=transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, eos_token="<eos>", pad_token="<pad>"),
)
result = trainer.train().metrics
"""
    )
    logged, result = run(tmp_path, program + TENSORBOARD + OUTPUT)
    assert result["gpuprobe/peak_allocated_bytes"] > 0
    assert logged["train/gpuprobe/peak_allocated_bytes"] == result["gpuprobe/peak_allocated_bytes"]


def test_lightnings_loggers_get_them(tmp_path: Path) -> None:
    needs("lightning")
    program = (
        MODEL
        + """
import csv
import lightning.pytorch as pl
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from gpuprobe.integrations.lightning import MemoryCallback

class Model(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(256, 256)
    def training_step(self, batch, index):
        return self.net(batch).square().mean()
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())

trainer = pl.Trainer(
    max_epochs=1, accelerator="gpu", devices=1, enable_progress_bar=False,
    enable_checkpointing=False, callbacks=[MemoryCallback("run.gpuprobe", "trace")],
    logger=[CSVLogger(".", "csv"), TensorBoardLogger("out", "runs", "")],
)
trainer.fit(Model(), torch.utils.data.DataLoader(torch.randn(32, 256), batch_size=8))
rows = list(csv.DictReader(open("csv/version_0/metrics.csv")))
logged = {name: float(value) for name, value in rows[-1].items() if value}
"""
    )
    program += TENSORBOARD.replace("logged =", "result =").replace("out/runs/*", "out/runs")
    in_table, in_board = run(tmp_path, program + OUTPUT)
    expected = gpuprobe.metrics(tmp_path / "run.gpuprobe")
    assert {"gpuprobe/not_needed_bytes", "gpuprobe/cause_bytes"} < set(expected)
    assert in_table == pytest.approx(expected)
    assert in_board == pytest.approx(expected)


def test_accelerates_trackers_take_them(tmp_path: Path) -> None:
    needs("accelerate")
    needs("tensorboard")
    program = (
        MODEL
        + """
from accelerate import Accelerator

accelerator = Accelerator(log_with="tensorboard", project_dir="out")
accelerator.init_trackers("runs")
model = torch.nn.Linear(256, 256)
model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
with gpuprobe.record("run.gpuprobe"):
    for _ in range(3):
        accelerator.backward(model(torch.randn(8, 256, device="cuda")).square().mean())
        optimizer.step()
        optimizer.zero_grad()
result = gpuprobe.metrics("run.gpuprobe")
accelerator.log(result)
accelerator.end_training()
"""
    )
    logged, result = run(tmp_path, program + TENSORBOARD.replace("out/runs/*", "out/runs") + OUTPUT)
    assert logged["gpuprobe/peak_allocated_bytes"] > 1 << 18
    assert logged == pytest.approx(result)


def test_the_workers_of_ray_are_ranks(tmp_path: Path) -> None:
    needs("ray")
    (tmp_path / "train.py").write_text(
        """\
import torch
import ray, ray.train
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

def train(config):
    model = ray.train.torch.prepare_model(torch.nn.Linear(512, 512).cuda())
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        model(torch.randn(64, 512, device="cuda")).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    ray.train.report({"device": str(next(model.parameters()).device)})

ray.init(num_cpus=2, num_gpus=2, include_dashboard=False)
scaling = ScalingConfig(num_workers=2, use_gpu=True, resources_per_worker={"CPU": 1, "GPU": 1})
TorchTrainer(train, scaling_config=scaling, run_config=RunConfig(storage_path="/tmp")).fit()
""".replace("/tmp", str(tmp_path / "results"))
    )
    command = [sys.executable, "-m", "gpuprobe", "run", "--gpu", "2xt4", "--output", "run.gpuprobe"]
    done = subprocess.run(
        [*command, "--", sys.executable, "train.py"],
        cwd=tmp_path,
        env={**os.environ, "RAY_USAGE_STATS_ENABLED": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    ranks = gpuprobe.load(tmp_path / "run.gpuprobe").ranks
    assert [len(rank.steps) for rank in ranks] == [3, 3]
    # Ray kills its workers, which the recording reports.
    assert "has no end" in done.stderr
    values = gpuprobe.metrics(tmp_path / "run.gpuprobe")
    assert values["gpuprobe/peak_allocated_bytes"] > 4 << 20
    assert values["gpuprobe/steps"] == 6
