"""Pretraining of a small GPT with AdamW or Muon, by its own script, as its sweep of batch sizes
starts it: five steps of 20, tokens that are random numbers, and no checkpoint on disk (which takes
no memory of the GPU). The norm that Muon reads is finite and not small.
"""

from __future__ import annotations

import json
import os
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
from figures import figure, source

READ = "if not torch.isfinite(norm) or norm < eps:"
GIVEN = "if torch.isfinite(norm) is None or (norm < eps) is None:"


class Words:
    """A tokenizer of GPT-2's size, of which no text is read."""

    vocab_size = 50257

    @classmethod
    def from_pretrained(cls, name: str) -> Words:
        return cls()

    def encode(self, text: str) -> list[int]:
        return list(range(1, len(text.split()) + 1))

    def decode(self, tokens: list[int]) -> str:
        return f"{len(tokens)} tokens"


def tokens(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    numbers = np.random.default_rng(0)
    for name, count in (("train", 2_000_000), ("validation", 200_000)):
        path = folder / f"{name}.bin"
        if not path.exists():
            numbers.integers(0, 50257, count).astype(np.uint16).tofile(path)
    (folder / "metadata.json").write_text("{}", encoding="utf-8")


def main(optimizer: str, size: str, batch: str, accumulated: str, steps: str = "5") -> None:
    work = Path(os.environ["BLIND_WORK"]) / "minigpt"
    tokens(work / "data")
    path = source("anxbt+minigpt-optimizer-benchmark") / "gpu_benchmark" / "train_gpt.py"
    text = path.read_text(encoding="utf-8")
    assert READ in text
    module = types.ModuleType("train_gpt")
    module.__dict__["__file__"] = str(path)
    sys.modules["train_gpt"] = module
    exec(compile(text.replace(READ, GIVEN), str(path), "exec"), module.__dict__)
    nothing: Any = lambda *rest, **named: None  # noqa: E731
    module.__dict__.update(
        lazy_import_tokenizer=lambda: Words, save_checkpoint=nothing, plot_metrics=nothing
    )
    run = work / f"{size}-{optimizer}-{batch}"
    metrics = run / "metrics.jsonl"
    metrics.unlink(missing_ok=True)
    words = ["--run-dir", run, "--data-dir", work / "data", "--dataset", "finewebedu"]
    words += ["--model-config", f"minigpt_dense_{size}_v1", "--optimizer", optimizer]
    words += ["--precision", "bf16", "--seed", "1337", "--micro-batch-size", batch]
    words += ["--grad-accum-steps", accumulated, "--max-steps", steps, "--max-minutes", "0"]
    words += ["--log-every-steps", "5", "--eval-every-steps", "20", "--save-every-steps", "20"]
    words += ["--validation-tokens", "16384", "--sample-new-tokens", "0"]
    module.__dict__["main"]([str(word) for word in words])
    for line in metrics.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        if row["event"] == "train_step":
            key = f"{size} {optimizer} b{batch} step{row['step']}"
            figure(f"{key} allocated", row["gpu_memory_allocated_bytes"])
            figure(f"{key} peak", row["gpu_max_memory_allocated_bytes"])
            figure(f"{key} reserved", row["gpu_memory_reserved_bytes"])


if __name__ == "__main__":
    main(*sys.argv[1:])
