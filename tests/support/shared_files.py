"""Files next to the checkout that tests use if they exist."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def shared_snapshots() -> list[Path]:
    """Real torch snapshots, if this checkout has them next to it; else an empty list.

    They are not part of the repository. ``GPUPROBE_SNAPSHOTS`` names another folder of
    ``.pickle`` snapshots to use instead.
    """
    folder = os.environ.get("GPUPROBE_SNAPSHOTS")
    where = Path(folder) if folder else ROOT.parent / "shared" / "data" / "snapshots"
    return sorted(where.glob("*.pickle")) if where.is_dir() else []
