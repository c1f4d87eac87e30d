"""A training of parameter-golf or of modded-nanogpt, with the program of its log, to the line with
its peak. The text is random numbers, in the published format; three steps are enough.
"""

from __future__ import annotations

import builtins
import itertools
import os
import re
import runpy
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from figures import figure, source, stand_in

PEAK = re.compile(r"peak memory allocated: (\d+) MiB reserved: (\d+) MiB")


class Pieces:
    """What a tokenizer says of its pieces, of one that has only words."""

    def __init__(self, model_file: str = "") -> None:
        self.size = int(os.environ.get("VOCAB_SIZE", "1024"))

    def vocab_size(self) -> int:
        return self.size

    def is_control(self, index: int) -> bool:
        return index < 3

    is_unknown = is_unused = is_byte = is_control

    def id_to_piece(self, index: int) -> str:
        return f"▁{index}"


def shard(path: Path, tokens: int, words: int) -> None:
    if path.exists():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    header = np.zeros(256, dtype="<i4")
    header[:3] = 20240520, 1, tokens
    numbers = np.random.default_rng(0).integers(3, words, tokens).astype("<u2")
    if words > 50256:
        numbers[::500] = 50256
    path.write_bytes(header.tobytes() + numbers.tobytes())


def until_peak(script: Path) -> None:
    """Run a script to the line with its peak. It asks for ``nvidia-smi``, which says nothing; and
    ``BLIND_CLOCK`` are seconds that pass at each look at the clock, of a program with phases.
    """
    tools = Path(os.environ["BLIND_WORK"]) / "tools"
    tools.mkdir(parents=True, exist_ok=True)
    (tools / "nvidia-smi").write_text("#!/bin/sh\n", encoding="utf-8")
    (tools / "nvidia-smi").chmod(0o755)
    os.environ["PATH"] = f"{tools}:{os.environ['PATH']}"
    pace = float(os.environ.get("BLIND_CLOCK", "0"))
    if pace:
        ticks = itertools.count()
        time.perf_counter = lambda: next(ticks) * pace
    plain = builtins.print

    def watched(*words: Any, **options: Any) -> None:
        plain(*words, **{"file": sys.stderr, **options})
        found = PEAK.search(" ".join(map(str, words)))
        if found:
            figure("allocated", int(found[1]) * 2**20)
            figure("reserved", int(found[2]) * 2**20)
            sys.exit(0)

    builtins.print = watched
    try:
        runpy.run_path(str(script), run_name="__main__")
    finally:
        builtins.print = plain


def golf(log: str) -> None:
    folder = source("openai+parameter-golf")
    work = Path(os.environ["BLIND_WORK"]) / "golf"
    words = int(os.environ.get("VOCAB_SIZE", "1024"))
    data = work / f"words{words}"
    shard(data / "fineweb_train_000000.bin", 8_000_000, words)
    shard(data / "fineweb_val_000000.bin", 1_100_000, words)
    (data / "words.model").touch()
    os.environ.update(
        DATA_PATH=str(data),
        TOKENIZER_PATH=str(data / "words.model"),
        WARMUP_STEPS="2",
        VAL_LOSS_EVERY="0",
    )
    if "BLIND_CLOCK" not in os.environ:
        os.environ.update(ITERATIONS="3", MAX_WALLCLOCK_SECONDS="100000")
    stand_in("sentencepiece", SentencePieceProcessor=Pieces)
    stand_in("zstandard")
    copy = work / "train_gpt.py"
    copy.write_text(program_of(folder / log), encoding="utf-8")
    os.chdir(work)
    until_peak(copy)


def program_of(log: Path) -> str:
    """A log starts with its program, up to a line of ``=``."""
    return log.read_text(encoding="utf-8").split("\n" + "=" * 100)[0]


def speedrun(log: str) -> None:
    folder = source("KellerJordan+modded-nanogpt")
    work = Path(os.environ["BLIND_WORK"]) / "speedrun"
    shard(work / "data/fineweb10B/fineweb_train_000000.bin", 4_000_000, 50257)
    shard(work / "data/fineweb10B/fineweb_val_000000.bin", 10_600_000, 50257)
    text = program_of(folder / log)
    text = re.sub(r"num_iterations = \d+", "num_iterations = 3", text)
    text = re.sub(r"val_tokens = \d+", "val_tokens = 2 * 8 * 4 * 64 * 1024", text)
    script = work / "train_gpt.py"
    script.write_text(text, encoding="utf-8")
    os.chdir(work)
    until_peak(script)


if __name__ == "__main__":
    {"golf": golf, "speedrun": speedrun}[sys.argv[1]](*sys.argv[2:])
