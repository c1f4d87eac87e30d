"""What the programs of ``blind_truth`` share: their sources, and how they print a figure."""

from __future__ import annotations

import importlib.metadata
import os
import sys
import types
from pathlib import Path
from typing import Any

STREAM = sys.stderr


def figure(key: str, value: float | str) -> None:
    """Print one figure: bytes, or ``OOM`` or ``fits`` for a verdict."""
    print("FIGURE", key.replace(" ", "_"), value, file=STREAM, flush=True)


def source(name: str, *paths: str) -> Path:
    """The checkout of a source; ``paths`` of it are searched by imports, the first one first."""
    folder = Path(os.environ["BLIND_SOURCES"]) / name
    for path in reversed(paths):
        sys.path.insert(0, str(folder / path))
    return folder


def without_versions() -> None:
    """Packages that ask for the version they are installed in are not installed."""
    importlib.metadata.version = lambda name: "0"


def stand_in(name: str, **members: Any) -> types.ModuleType:
    """A module of that name with these members, instead of one that would download or compile."""
    module = types.ModuleType(name)
    module.__dict__.update(members)
    sys.modules[name] = module
    return module
