"""Notes that processes leave in a folder for the one that has started them."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Sequence
from os import getpid
from pathlib import Path
from typing import Final

NOTES: Final = "GPUPROBE_NOTES"
"""The environment variable with the folder."""
_ASSUMED: Final = ".assumed"

_made: tuple[int, Path] | None = None
"""The folder of notes that a process has made, and its id: forked children have this, too."""


def make_notes() -> Path:
    """A new folder for the notes of processes that this one starts; `remove_notes` removes it.
    Raises OSError.
    """
    global _made
    import tempfile  # 7 ms, which torch has imported

    # No TemporaryDirectory: each forked child that ends normally would remove it.
    folder = Path(tempfile.mkdtemp(prefix="gpuprobe-"))
    _made = getpid(), folder
    return folder


def remove_notes() -> None:
    """Remove the folder, if this process has made it."""
    global _made
    if _made is not None and _made[0] == getpid():
        import shutil

        shutil.rmtree(_made[1], ignore_errors=True)
        _made = None


def read_notes(folder: Path) -> dict[int, str]:
    """The process ids in the notes, and why each has no recording, or an incomplete one; "" if it
    has a whole one.
    """
    found = {}
    with contextlib.suppress(OSError):  # the program has removed it
        for file in folder.iterdir():
            if not file.name.isdecimal():
                continue
            found[int(file.name)] = file.read_text(encoding="utf-8", errors="replace")
    return found


def note_assumed(texts: Sequence[str]) -> None:
    """Leave what this process has assumed for the process that started it."""
    folder = os.environ.get(NOTES)
    if folder is not None and texts:
        with contextlib.suppress(OSError):  # the program has ended: nothing reads the notes
            file = Path(folder) / f"{getpid()}{_ASSUMED}"
            file.write_text(json.dumps(list(texts)), encoding="utf-8")


def read_assumed(folder: Path) -> tuple[str, ...]:
    """What processes have left with `note_assumed`, each once."""
    found: dict[str, None] = {}
    with contextlib.suppress(OSError):
        for file in sorted(folder.glob(f"*{_ASSUMED}")):
            found |= dict.fromkeys(json.loads(file.read_text(encoding="utf-8")))
    return tuple(found)
