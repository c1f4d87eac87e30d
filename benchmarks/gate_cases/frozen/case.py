"""A case of the frozen set: how its change is applied, in part or as a whole."""

from __future__ import annotations

import shutil
from collections.abc import Collection, Iterator
from difflib import SequenceMatcher
from pathlib import Path
from typing import NamedTuple

PROGRAMS = Path(__file__).parent / "programs"
SCRIPT = "train.py"
"""What is run, in the folder of every program."""


class Edit(NamedTuple):
    """One hunk. ``old`` is in the file exactly ``times`` times; where ``old`` is empty, the file is
    new.

    ``cause`` is a letter that hunks of one cause share; a hunk without one costs no memory.
    ``named`` is False for what a cause needs, and no reader would name: an import, a registry.
    """

    file: str
    old: str
    new: str
    cause: str = ""
    named: bool = True
    times: int = 1


class Move(NamedTuple):
    """A file is renamed. Edits after it use the new name."""

    file: str
    to: str


class Case(NamedTuple):
    """``program`` is a folder of `PROGRAMS`; ``kind`` is what the cause is: ``yaml``,
    ``decorator``, ``lifetime`` …; ``source`` is the public commit or issue that the change is
    modelled on, as ``owner/name@commit`` or ``owner/name#number``.
    """

    program: str
    kind: str
    change: tuple[Edit | Move, ...]
    source: str = ""

    @property
    def causes(self) -> tuple[str, ...]:
        found = [part.cause for part in self.change if isinstance(part, Edit) and part.cause]
        return tuple(dict.fromkeys(found))


class Lines(NamedTuple):
    """Lines ``first`` to ``last`` of a file as it is after the change, from 1."""

    file: str
    first: int
    last: int


def files_of(program: str) -> dict[str, str]:
    """The texts of a program, by path."""
    root = PROGRAMS / program
    return {
        path.relative_to(root).as_posix(): path.read_text(encoding="utf-8")
        for path in sorted(root.rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts
    }


def changed(
    case: Case, without: Collection[str] = (), *, only_named: bool = False
) -> dict[str, str]:
    """The texts after the change, but for the causes in ``without``; with ``only_named``, what
    those causes need is kept.

    Raises ValueError where an edit does not apply.
    """
    files = files_of(case.program)
    for part in case.change:
        if isinstance(part, Move):
            if part.file not in files or part.to in files:
                raise ValueError(f"{case.program}: cannot rename {part.file} to {part.to}")
            files[part.to] = files.pop(part.file)
            continue
        if part.cause in without and part.cause and (part.named or not only_named):
            continue
        if not part.old:
            if part.file in files:
                raise ValueError(f"{case.program}: {part.file} is not new")
            files[part.file] = part.new
            continue
        count = files.get(part.file, "").count(part.old)
        if count != part.times:
            raise ValueError(f"{case.program}/{part.file}: {count} times: {part.old!r}")
        files[part.file] = files[part.file].replace(part.old, part.new)
    return files


def write(folder: Path, files: dict[str, str]) -> None:
    """Make ``folder`` contain these files, and none that an earlier call wrote."""
    if folder.exists():
        for path in folder.iterdir():
            if path.name != ".git":
                shutil.rmtree(path) if path.is_dir() else path.unlink()
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def lines_of(case: Case, cause: str, *, only_named: bool = True) -> tuple[Lines, ...]:
    """The lines that a reader would name: those that taking the cause back changes, and of removed
    lines their nearest neighbours that are not blank. Without ``only_named``, also those of what
    the cause needs."""
    after, before = changed(case), changed(case, (cause,), only_named=only_named)
    found: list[Lines] = []
    for file in sorted(after):
        if after[file] != before.get(file):
            found += _ranges(file, before.get(file, "").splitlines(), after[file].splitlines())
    return tuple(found)


def _ranges(file: str, before: list[str], after: list[str]) -> Iterator[Lines]:
    matcher = SequenceMatcher(a=before, b=after, autojunk=False)
    for tag, _, _, first, last in matcher.get_opcodes():
        if tag == "equal":
            continue
        if tag != "delete":
            yield Lines(file, first + 1, last)
            continue
        above = [n for n in range(1, first + 1) if after[n - 1].strip()]
        below = [n for n in range(first + 1, len(after) + 1) if after[n - 1].strip()]
        for neighbour in (above[-1:], below[:1]):
            for n in neighbour:
                yield Lines(file, n, n)
