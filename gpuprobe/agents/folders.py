"""The folders whose files a tool may use."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from gpuprobe.errors import UsageError


class Folders(NamedTuple):
    """Folders as absolute paths without symbolic links. Relative paths start at the first."""

    roots: tuple[str, ...]

    @staticmethod
    def of(working: str, allowed: Sequence[str]) -> Folders:
        """The working folder and those that ``--allow`` adds. Some clients start servers in ``/``,
        which would include every file: then only the others count.

        Raises UsageError if an added folder does not exist, or if ``/`` is the only folder.
        """
        for folder in allowed:
            if not Path(folder).is_dir():
                raise UsageError(f"no such folder: {folder}", hint="--allow takes a folder")
        roots = [os.path.realpath(folder) for folder in (working, *allowed)]
        if roots[0] == os.path.realpath(os.sep):
            del roots[0]
            if not roots:
                raise UsageError(
                    "the working folder is /, which would give the tools every file",
                    hint="start it in the project's folder, or gpuprobe mcp --allow FOLDER",
                )
        return Folders(tuple(dict.fromkeys(roots)))

    def resolve(self, path: str) -> str:
        """The absolute path without symbolic links. It does not have to exist.

        Raises UsageError for a path outside the folders, and for a directory that contains a
        symbolic link to a file outside.
        """
        if "\0" in path or not path:
            raise UsageError(f"not a path: {path!r}")
        found = os.path.realpath(os.path.join(self.roots[0], path))  # noqa: PTH118
        if not self._contains(found):
            raise self._outside(path)
        for link in _links_in(found):
            if not self._contains(os.path.realpath(link)):
                raise self._outside(link)
        return found

    def _contains(self, found: str) -> bool:
        return any(Path(found).is_relative_to(root) for root in self.roots)

    def _outside(self, path: str) -> UsageError:
        return UsageError(
            f"{path} is outside the folders that the tools may use: {', '.join(self.roots)}",
            hint="gpuprobe mcp --allow FOLDER adds a folder",
        )


def _links_in(folder: str) -> Iterator[str]:
    """The symbolic links in a directory tree, whose links to directories are not followed."""
    for parent, folders, files in os.walk(folder):
        for name in (*folders, *files):
            entry = os.path.join(parent, name)  # noqa: PTH118 - a recording may have many files
            if os.path.islink(entry):  # noqa: PTH114
                yield entry
