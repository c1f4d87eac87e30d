"""The modules that a run imports, for a process that forks many: each imports them only once."""

from __future__ import annotations

import contextlib
import sys
from importlib import import_module
from pathlib import Path


def note_modules(file: Path) -> None:
    """Write the names of torch's and gpuprobe's modules that this process has imported."""
    names = [name for name in sys.modules if name.partition(".")[0] in ("torch", "gpuprobe")]
    file.write_text("\n".join(names))


def import_noted(file: Path) -> None:
    """Import what another process has noted."""
    for name in file.read_text().split():
        with contextlib.suppress(ImportError):  # torch makes some modules itself
            import_module(name)
