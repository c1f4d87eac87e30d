"""Fixtures shared by all tests."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def shared_snapshots() -> list[Path]:
    """Real torch snapshots, where this checkout has them beside it; else an empty list.

    They are not part of the repository. ``GPUPROBE_SNAPSHOTS`` names another folder of
    ``.pickle`` snapshots to use instead.
    """
    folder = os.environ.get("GPUPROBE_SNAPSHOTS")
    where = Path(folder) if folder else ROOT.parent / "shared" / "data" / "snapshots"
    return sorted(where.glob("*.pickle")) if where.is_dir() else []


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not any(item.get_closest_marker("gpu") for item in items):
        return
    try:
        import torch

        reason = "" if torch.cuda.is_available() else "torch sees no CUDA device on this machine"
    except ImportError:
        reason = "torch is not installed"
    if reason:
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason=reason))
