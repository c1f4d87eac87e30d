"""The repository's name, ``OWNER/NAME``: set in one place, used on every page.

    python docs/repository.py                 print it
    python docs/repository.py OWNER/NAME      change it everywhere: pyproject.toml, pages, messages

The place is ``Repository`` of ``[project.urls]`` in pyproject.toml. Commands that install from the
repository, ``uses:`` of the action, the pre-commit hook and the address for bug reports follow.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

_PLACE = re.compile(r'^Repository = "https://github\.com/([\w.-]+/[\w.-]+)"$', re.MULTILINE)
_NAME = re.compile(r"[\w.-]+/[\w.-]+")


def name(root: Path = ROOT) -> str:
    """``OWNER/NAME``. Raises ValueError if pyproject.toml does not have it."""
    match = _PLACE.search((root / "pyproject.toml").read_text("utf-8"))
    if match is None:
        raise ValueError("pyproject.toml: no Repository in [project.urls]")
    return match.group(1)


def files(root: Path = ROOT) -> Iterator[Path]:
    """Where the name may occur."""
    yield root / "pyproject.toml"
    yield from sorted(root.glob("*.md"))
    yield from (root / name for name in ("action.yml", "CITATION.cff", "Dockerfile"))
    yield from sorted((root / ".github").rglob("*.yml"))
    yield root / "packaging" / "conda" / "recipe.yaml"
    yield root / "examples" / "does_it_fit.ipynb"
    yield from sorted((root / "docs").rglob("*.md"))
    yield root / "gpuprobe" / "cli" / "parser.py"
    yield root / "gpuprobe" / "native" / "libraries.py"


def rename(new: str, root: Path = ROOT) -> list[Path]:
    """Change the name everywhere; the files that changed."""
    if not _NAME.fullmatch(new):
        raise ValueError(f"{new!r} is not OWNER/NAME")
    # As a whole name only: "gpuprobe/gpuprobe" is also the beginning of paths in this repository.
    known = re.escape(name(root))
    pattern = re.compile(rf"(?<=github\.com/){known}(?![\w-])|(?<=uses: ){known}(?=@)")
    changed = []
    for path in files(root):
        before = path.read_text("utf-8")
        after = pattern.sub(new, before)
        if after != before:
            path.write_text(after, "utf-8")
            changed.append(path)
    return changed


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        sys.stdout.writelines(f"{path}\n" for path in rename(argument))
    sys.stdout.write(f"{name()}\n")
