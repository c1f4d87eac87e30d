"""Steps of a language model in one solution of CS336: its memory profile and its checkpoints."""

from __future__ import annotations

import importlib
import sys
import tempfile
from pathlib import Path

import torch
from figures import figure, source, without_versions


def profile() -> None:
    module = importlib.import_module("cs336_systems.memory_profiling.profile")
    for precision in ("off", "bf16"):
        for context in (128, 512):
            for mode in ("forward", "train"):
                config = module.MemoryCellConfig(
                    context_length=context, mode=mode, mixed_precision=precision
                )
                with tempfile.TemporaryDirectory() as scratch:
                    found = module.profile_cell(config, Path(scratch))
                key = f"ctx{context} {precision} {mode}"
                stages = {
                    name: stage["max_allocated_bytes"] for name, stage in found["stages"].items()
                }
                figure(f"{key} peak", max(stages.values()))
                for name, peak in stages.items() if mode == "train" else ():
                    figure(f"{key} {name}", peak)


def checkpoint(context: str) -> None:
    module = importlib.import_module("cs336_systems.gradient_checkpointing.profile")
    base = module.CheckpointProfileConfig(context_length=int(context))
    for result in module.run_sweep(base_cfg=base, device=torch.device("cuda")):
        key = f"ctx{context} segment {result.segment_size}"
        figure(f"{key} verdict", "OOM" if result.oom else "fits")
        if not result.oom:
            figure(f"{key} peak", result.peak_allocated_bytes)


if __name__ == "__main__":
    without_versions()
    source("EnzoDing-rgb+cs336-assignment2-systems", "cs336-basics", ".")
    {"profile": profile, "checkpoint": checkpoint}[sys.argv[1]](*sys.argv[2:])
