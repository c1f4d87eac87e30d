"""The notes of a release, from CHANGELOG.md: everything below its heading.

    python packaging/release_notes.py v0.2.0

Exits with an error unless the tag is the version of gpuprobe/_version.py, and the changelog has a
day for it.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def version(root: Path = ROOT) -> str:
    """What gpuprobe/_version.py has. Raises ValueError if it has none."""
    text = (root / "gpuprobe" / "_version.py").read_text("utf-8")
    match = re.search(r'^__version__ = "([\w.+-]+)"$', text, re.MULTILINE)
    if match is None:
        raise ValueError("gpuprobe/_version.py has no __version__")
    return match[1]


def notes(tag: str, root: Path = ROOT) -> str:
    """The notes in Markdown. Raises ValueError for a tag that cannot be released."""
    released = version(root)
    if tag != f"v{released}":
        raise ValueError(f"the tag is {tag}, gpuprobe/_version.py has {released}")
    text = (root / "CHANGELOG.md").read_text("utf-8")
    sections = re.split(r"^## \[(.+?)\] - (.+)$", text, flags=re.MULTILINE)
    for name, day, body in zip(sections[1::3], sections[2::3], sections[3::3], strict=True):
        if name == released:
            if not re.fullmatch(r"\d{4}-\d\d-\d\d", day):
                raise ValueError(f"CHANGELOG.md: {released} has no day of its release: {day}")
            return body.strip() + "\n"
    raise ValueError(f"CHANGELOG.md has nothing about {released}")


if __name__ == "__main__":
    try:
        sys.stdout.write(notes(*sys.argv[1:]))
    except ValueError as error:
        raise SystemExit(str(error)) from None
