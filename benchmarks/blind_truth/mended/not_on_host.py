"""``steps.py`` with its models, of 14 GB, not built on the host: each parameter and buffer is made
on the GPU without a value, in the order that ``.to(device)`` makes them in. The steps are profiled
in the order of the source's suite, since blocks of earlier ones are used again.
"""

from __future__ import annotations

import importlib
import itertools
import sys
import tempfile
from pathlib import Path
from typing import Any

import steps
import torch
from figures import figure, source, without_versions


def profile(module: Any) -> None:
    for context, mode, precision in itertools.product(
        (128, 512), ("forward", "train"), ("off", "bf16")
    ):
        config = module.MemoryCellConfig(
            context_length=context, mode=mode, mixed_precision=precision
        )
        with tempfile.TemporaryDirectory() as scratch:
            found = module.profile_cell(config, Path(scratch))
        key = f"ctx{context} {precision} {mode}"
        stages = {name: stage["max_allocated_bytes"] for name, stage in found["stages"].items()}
        figure(f"{key} peak", max(stages.values()))
        for name, peak in stages.items() if mode == "train" else ():
            figure(f"{key} {name}", peak)


def main(what: str, *words: str) -> None:
    without_versions()
    source("EnzoDing-rgb+cs336-assignment2-systems", "cs336-basics", ".")
    plain: Any = importlib.import_module("cs336_systems.e2e_timing.e2e").build_model

    def build(config: Any, device: torch.device) -> torch.nn.Module:
        nowhere = torch.device("meta")
        with nowhere:
            model: torch.nn.Module = plain(config, nowhere)
        return model.to_empty(device=device)

    folder = {"profile": "memory_profiling", "checkpoint": "gradient_checkpointing"}[what]
    module: Any = importlib.import_module(f"cs336_systems.{folder}.profile")
    module.build_model = build
    if what == "profile":
        profile(module)
    else:
        steps.checkpoint(*words)


if __name__ == "__main__":
    main(*sys.argv[1:])
