"""The history of a baseline: the program's source in the commit of the baseline's file.

A baseline has digests of the program's statements, so it can be compared without a repository. With
a repository, the commit that last changed the baseline's file has the texts as well. A text is used
only if its digests are equal to the baseline's: the program may have been measured with changes
that were committed later, or never, and in a shallow clone the commit may be a different one.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from gpuprobe.analysis.baseline.model import KeptFile, file_digest
from gpuprobe.analysis.blame.source import Source, source_of

if TYPE_CHECKING:
    from gpuprobe.analysis.baseline.model import Baseline

_SECONDS: Final = 30
"""The time limit of one call of git: a network disk may never respond."""

_SETTINGS: Final = (
    ".cfg",
    ".conf",
    ".ini",
    ".json",
    ".lock",
    ".sh",
    ".toml",
    ".txt",
    ".yaml",
    ".yml",
)
"""Suffixes of files that configure programs."""


@dataclass(frozen=True, slots=True)
class BaselineHistory:
    """A baseline with the texts of its sources, as far as the commit has them. ``settings``: the
    names of changed files that are not Python, relative to the project."""

    commit: str
    baseline: Baseline
    settings: tuple[str, ...] = ()


def history(before: Baseline, path: str | os.PathLike[str], root: str) -> BaselineHistory | None:
    """The history of the baseline in the file ``path``, from the repository of the project in
    ``root``; None without a repository or git, or if the file was never committed.
    """
    folder = root or str(Path.cwd())
    file = os.path.realpath(path)
    found = _git(folder, "log", "-1", "--format=%H", "--", file)
    commit = found.decode().strip() if found else ""
    if not commit:
        return None
    sources: dict[str, Source] = dict(before.sources)
    for name, text in _texts(folder, commit, list(sources)).items():
        source = source_of(text)
        if sources[name].statements == source.statements:
            sources[name] = source
    return BaselineHistory(commit, replace(before, sources=sources), _changed(folder, commit, file))


def _texts(folder: str, commit: str, names: Sequence[str]) -> dict[str, str]:
    """The texts of a commit's files, whose names are relative to the folder."""
    names = [name for name in names if "\n" not in name and "\0" not in name]
    request = "".join(f"{commit}:./{name}\n" for name in names)
    output = _git(folder, "cat-file", "--batch", stdin=request.encode("utf-8", "surrogateescape"))
    found: dict[str, str] = {}
    if output is None:
        return found
    position = 0
    for name in names:
        end = output.find(b"\n", position)
        header = output[position:end].split()
        position = end + 1
        if len(header) != 3 or header[1] not in (b"blob", b"tree", b"commit", b"tag"):
            continue  # missing
        size = int(header[2])
        text = output[position : position + size]
        position += size + 1
        if header[1] == b"blob":
            found[name] = text.decode("utf-8", "replace")
    return found


def committed_texts(
    found: BaselineHistory, known: Mapping[str, KeptFile], names: Iterable[str], root: str
) -> dict[str, str]:
    """The texts of files in the commit of the baseline, by name. Files that are ``known`` to the
    baseline with a different digest are left out."""
    texts = _texts(root or str(Path.cwd()), found.commit, sorted(names))
    return {
        name: text
        for name, text in texts.items()
        if name not in known or known[name].digest == file_digest(text)
    }


def _changed(folder: str, commit: str, file: str) -> tuple[str, ...]:
    """The files that configure programs and differ from the commit, except ``file``."""
    output = _git(
        folder, "diff", "--name-only", "--relative", "-z", "--no-ext-diff", commit, "--", "."
    )
    names = (output or b"").decode("utf-8", "replace").split("\0")
    return tuple(
        name
        for name in names
        if name.endswith(_SETTINGS) and os.path.realpath(Path(folder, name)) != file
    )


def _git(folder: str, *arguments: str, stdin: bytes = b"") -> bytes | None:
    """The output of git; None if it fails or is not installed."""
    # Inside a git hook (pre-push) these name the repository, relative to a different folder.
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_PREFIX")
    }
    command = ["git", "-C", folder, "-c", "core.fsmonitor=false", "--literal-pathspecs", *arguments]
    try:
        done = subprocess.run(
            command,
            input=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**environment, "GIT_OPTIONAL_LOCKS": "0", "LC_ALL": "C"},
            timeout=_SECONDS,
            check=False,
        )
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return None  # no git here, a folder with a null byte in its name, or no answer
    return done.stdout if done.returncode == 0 else None
