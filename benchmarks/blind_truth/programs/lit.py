"""Finetuning and generating with Lit-GPT, as its table of resources describes them, by its own
scripts of that day. Checkpoints and tokenizers are not there: weights are what they are at first,
which needs the same memory, and prompts are numbers. Alpaca is one sample of the longest length
that the table names and many of 100 tokens.
"""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from typing import Any

import torch
from figures import figure, source

LONGEST = {"phi-1_5": 1044, "stablelm-base-alpha-3b": 1034, "falcon-40b": 1079}
LLAMA = 1304
SHORT = 100


class Words:
    """A tokenizer with a prompt of five tokens."""

    eos_id = bos_id = None

    def __init__(self, folder: Any) -> None:
        pass

    def encode(self, text: str, device: Any = None, **rest: Any) -> torch.Tensor:
        length = min(len(text.split()) + 1, 60)
        return torch.arange(1, length + 1, dtype=torch.int32, device=device)

    def decode(self, tokens: torch.Tensor) -> str:
        return f"{len(tokens)} tokens"


def sample(length: int) -> dict[str, torch.Tensor]:
    numbers = torch.arange(length) % 1000 + 1
    return {"input_ids": numbers, "labels": numbers.clone()}


def finetune(script: str, name: str, batch: str) -> None:
    module: Any = importlib.import_module(f"finetune.{script}")
    work = Path(os.environ["BLIND_WORK"]) / "lit"
    data, checkpoint, out = work / "alpaca", work / name, work / "out"
    data.mkdir(parents=True, exist_ok=True)
    checkpoint.mkdir(exist_ok=True)
    longest = LONGEST.get(name, LLAMA)
    torch.save([sample(SHORT), sample(longest), *[sample(SHORT)] * 20], data / "train.pt")
    torch.save([sample(SHORT)] * 20, data / "test.pt")
    module.Tokenizer = Words
    module.check_valid_checkpoint_dir = lambda folder: None
    module.load_checkpoint = lambda *rest, **named: None
    if hasattr(module, "lazy_load"):
        module.lazy_load = lambda *rest, **named: {}
    module.measure_flops = module.estimate_flops = lambda *rest, **named: 1.0
    module.micro_batch_size = int(batch)
    module.gradient_accumulation_iters = 2
    module.max_iters = 4
    module.eval_iters = 2
    module.eval_max_new_tokens = 4
    for saving in ("save_lora_checkpoint", "save_adapter_checkpoint", "save_adapter_v2_checkpoint"):
        if hasattr(module, saving):
            setattr(module, saving, lambda *rest, **named: None)
    try:
        module.setup(data_dir=data, checkpoint_dir=checkpoint, out_dir=out, precision="bf16-true")
    except torch.cuda.OutOfMemoryError:
        figure("verdict", "OOM")
        return
    figure("verdict", "fits")
    figure("peak", torch.cuda.max_memory_allocated())


def generate(name: str) -> None:
    module: Any = importlib.import_module("generate.base")
    config = importlib.import_module("lit_gpt.config")
    module.Tokenizer = Words
    module.check_valid_checkpoint_dir = lambda folder: None
    module.load_checkpoint = lambda *rest, **named: None
    module.Config.from_json = lambda path: config.Config.from_name(name)
    torch.set_float32_matmul_precision("high")
    try:
        module.main(checkpoint_dir=Path(name), precision="bf16-true")
    except torch.cuda.OutOfMemoryError:
        figure("verdict", "OOM")
        return
    figure("verdict", "fits")
    figure("peak", torch.cuda.max_memory_allocated())


if __name__ == "__main__":
    source("Lightning-AI+litgpt", ".")
    {"finetune": finetune, "generate": generate}[sys.argv[1]](*sys.argv[2:])
