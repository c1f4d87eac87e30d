"""One trial of a check: its request and result, and the copy of the project that it runs in.

The copy is a real tree, so that everything that finds a file by its path works as in the project:
relative names, ``__file__``, ``python -m``, processes that the program starts. The folders on the
path to a file of the program are real, and so are small files in them: what the program overwrites
there is the copy. Everything else (data sets, checkpoints, environments) is a link to the project's
own, and a link within the project leads to the same place of the copy.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Final

from gpuprobe.errors import EnvironmentUnavailable


@dataclass(frozen=True)
class TrialRequest:
    """A run, with the arguments of `gpuprobe.api.check.measure`, in the copy ``tree`` of the
    project ``root``. ``folder``: the working directory, in the copy. ``seconds``: its time limit.
    ``epoch``: see `gpuprobe.planning.first_epoch`, 0 for the whole program. ``endless``: the GPU
    never runs out of memory. ``test``: the node id of a test of pytest, whose options are
    ``arguments`` then. ``confined``: the folder that it may write in, "" for all; its output is
    then in the file ``output``.
    """

    tree: str
    root: str
    folder: str
    target: str
    arguments: list[str]
    module: bool
    gpu: str | None
    hazards: bool
    steps: int | None
    epoch: int
    endless: bool
    compute: str
    seconds: float
    test: str = ""
    confined: str = ""
    output: str = ""


@dataclass(frozen=True)
class TrialFigures:
    """The figures of a run: metrics and phases as in a baseline; or why it was not measured.

    Of a confined run also its ``seconds`` and ``output``, the figures of ``memory`` (bytes) that it
    has queried from torch, and the first path outside that it tried to change, ``outside``.
    """

    metrics: dict[str, int]
    phases: dict[str, int]
    failed: str = ""
    seconds: float = 0.0
    output: str = ""
    memory: Sequence[int] = ()
    outside: str = ""


_MOST_COPIED: Final = 256 << 10  # bytes of a file that is copied, not linked
_MOST_ENTRIES: Final = 5_000  # of one folder
_LEFT_OUT: Final = frozenset(("__pycache__",))


def make_tree(folder: Path, root: Path, texts: Mapping[str, str | None]) -> None:
    """Copy the project in ``root`` into the new ``folder``. ``texts``: the contents of the
    program's files, None for a file that must not exist. Raises OSError if the copy cannot be
    written, EnvironmentUnavailable for a folder with too many files.
    """
    folders = {"."}
    for name in texts:
        folders.update(str(parent) for parent in PurePosixPath(name).parents)
    for inner in sorted(folders, key=lambda name: (name.count("/"), name)):
        (folder / inner).mkdir(parents=True, exist_ok=True)
        if (root / inner).is_dir():
            _mirror(root, folder, inner, folders, texts)
    for name, text in texts.items():
        if text is not None:
            (folder / name).write_bytes(text.encode("utf-8", "surrogateescape"))


def _mirror(
    root: Path,
    folder: Path,
    inner: str,
    folders: set[str],
    texts: Mapping[str, str | None],
) -> None:
    with os.scandir(root / inner) as entries:
        for number, entry in enumerate(entries):
            if number >= _MOST_ENTRIES:
                raise EnvironmentUnavailable(
                    f"the folder {inner} of the project has more than {_MOST_ENTRIES} files"
                )
            name = str(PurePosixPath(inner, entry.name))
            if name in texts or name in folders or entry.name in _LEFT_OUT:
                continue
            target = folder / name
            small = entry.is_file(follow_symlinks=False) and entry.stat().st_size <= _MOST_COPIED
            if small and os.access(entry.path, os.R_OK):
                shutil.copy2(entry.path, target)
            else:
                target.symlink_to(_linked(entry, folder, root))


def _linked(entry: os.DirEntry[str], folder: Path, root: Path) -> Path:
    real = Path(os.path.realpath(entry.path))
    whole = Path(os.path.realpath(root))
    inside = entry.is_symlink() and real.is_relative_to(whole) and not _LEFT_OUT & {*real.parts}
    return folder / real.relative_to(whole) if inside else real


def moved(text: str, root: str, folder: str) -> str:
    """An argument or a setting with the project's folder replaced by that of the copy."""
    for one in dict.fromkeys((root, os.path.realpath(root))):
        if text == one or f"{one}{os.sep}" in text:
            return text.replace(one, folder)
    return text


def moved_all(texts: Sequence[str], root: str, folder: str) -> list[str]:
    """`moved` of each."""
    return [moved(text, root, folder) for text in texts]
