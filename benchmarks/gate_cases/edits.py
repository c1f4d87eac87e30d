"""What a case is, and how its edits are made."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import NamedTuple

PROGRAMS = Path(__file__).parent / "programs"


class Edit(NamedTuple):
    """``old`` is in the file exactly once, unless ``times`` has another number."""

    file: str
    old: str
    new: str
    times: int = 1


class Case(NamedTuple):
    """``program`` is a folder of `PROGRAMS`. ``along``: harmless edits, by name, which are made
    first. ``blame``: the texts of the lines, as they are after the edits, that are the cause; of
    lines that were deleted, their neighbours.
    """

    program: str
    edits: tuple[Edit, ...]
    blame: tuple[str, ...] = ()
    along: tuple[str, ...] = ()
    source: str = ""


def make(folder: Path, program: str, edits: tuple[Edit, ...]) -> Path:
    """A copy of the program in a new folder, edited. Raises AssertionError if a text does not
    occur as often as the edit expects."""
    project = folder / program
    shutil.copytree(PROGRAMS / program, project, ignore=shutil.ignore_patterns("__pycache__"))
    for edit in edits:
        path = project / edit.file
        text = path.read_text(encoding="utf-8")
        assert text.count(edit.old) == edit.times, (program, edit, text.count(edit.old))
        path.write_text(text.replace(edit.old, edit.new), encoding="utf-8")
    return project
