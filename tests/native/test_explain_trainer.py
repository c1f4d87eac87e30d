"""``gpuprobe explain`` of a Trainer of transformers, whose evaluation keeps all predictions."""

from __future__ import annotations

import json
from pathlib import Path

from native_commands import gpuprobe

PROGRAM = """\
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

rows = [{key: torch.full((128,), row) for key in ("input_ids", "labels")} for row in range(48)]
config = LlamaConfig(
    vocab_size=8000, hidden_size=32, intermediate_size=64, num_hidden_layers=1,
    num_attention_heads=2,
)
arguments = TrainingArguments(
    output_dir="out", max_steps=1, eval_strategy="steps", eval_steps=1, save_strategy="no",
    per_device_train_batch_size=2, report_to=[],
)
Trainer(
    model=LlamaForCausalLM(config), args=arguments, train_dataset=rows, eval_dataset=rows,
    compute_metrics=lambda results: {"rows": len(results.predictions)},
).train()
"""


def test_the_trainers_own_switch_is_tried(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PROGRAM)
    options = ("--max-seconds", "900", "--compute", "shapes", "--gpu", "t4", "--json")
    done = gpuprobe("explain", *options, "train.py", cwd=tmp_path)
    cause = json.loads(done.stdout)["causes"][0]
    assert cause["rule"] == "grown-by-joining", done.stderr
    assert "eval_accumulation_steps=1" in cause["remedy"]
    effect = cause["effect"]
    assert effect["certainty"] == "tried"
    assert "report_to=[], eval_accumulation_steps=1\n" in effect["patch"]
    predictions = 48 * 128 * 8000 * 4
    assert effect["before"] - effect["after"] > predictions / 2
