"""``steps.py`` with its models built on the GPU: they have 14 GB, and in the program are built on the
host. All peaks are those of later steps, after ``reset_peak_memory_stats``.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

import steps
import torch
from figures import source, without_versions


def main(what: str, *words: str) -> None:
    without_versions()
    source("EnzoDing-rgb+cs336-assignment2-systems", "cs336-basics", ".")
    plain: Any = importlib.import_module("cs336_systems.e2e_timing.e2e").build_model

    def build(config: Any, device: torch.device) -> torch.nn.Module:
        with device:
            model: torch.nn.Module = plain(config, device)
        return model

    folder = {"profile": "memory_profiling", "checkpoint": "gradient_checkpointing"}[what]
    module: Any = importlib.import_module(f"cs336_systems.{folder}.profile")
    module.build_model = build
    {"profile": steps.profile, "checkpoint": steps.checkpoint}[what](*words)


if __name__ == "__main__":
    main(*sys.argv[1:])
