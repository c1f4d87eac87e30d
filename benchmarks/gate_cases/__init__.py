"""Edits of training programs, as people commit them: what `gpuprobe check` is measured on.

``cases.json`` has one row per edit: the folder of ``programs`` that it changes, its patch, the
peaks before and after in bytes, and for each cause the lines of the changed program that a reader
would name (``FILE:FIRST-LAST``) and the bytes of the peak that taking it back saves. A harmless
edit has no causes. These are the ten costly edits of the last of four sets that were committed
before `gpuprobe check` ran on them, and the five harmless ones of the same programs.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

FOLDER = Path(__file__).resolve().parent
SCRIPT = "train.py"
"""What is run, in the folder of every program."""


class Case(NamedTuple):
    """One edit. ``lines``: those that are right to name, as ``FILE:LINE``, one set per cause."""

    name: str
    program: str
    patch: Path
    before: int
    after: int
    lines: tuple[frozenset[str], ...]

    def write(self, project: Path) -> None:
        """Copy the program as it was before the edit into a folder that does not exist."""
        shutil.copytree(FOLDER / "programs" / self.program, project)

    def apply(self, project: Path) -> None:
        """Make the edit. Raises CalledProcessError if the patch does not apply."""
        command = ["git", "apply", "--whitespace=nowarn", str(self.patch)]
        subprocess.run(command, cwd=project, check=True)


def cases() -> tuple[Case, ...]:
    """All of them, the costly ones first."""
    rows = json.loads((FOLDER / "cases.json").read_text(encoding="utf-8"))
    return tuple(
        Case(
            row["name"],
            row["program"],
            FOLDER / f"{row['patch']}.patch",
            row["before"],
            row["after"],
            tuple(_lines(cause["lines"]) for cause in row["causes"]),
        )
        for row in rows
    )


def _lines(ranges: list[str]) -> frozenset[str]:
    found = set()
    for text in ranges:
        file, _, numbers = text.rpartition(":")
        first, last = map(int, numbers.split("-"))
        found |= {f"{file}:{number}" for number in range(first, last + 1)}
    return frozenset(found)
