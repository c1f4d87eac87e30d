"""What a repository knows of a baseline: the program's source as it was committed with it.

A baseline keeps digests of the program's statements, so it can be compared without a repository.
Where there is one, the commit that last changed the baseline's file has the text as well. A file is
taken from there only where its digests are those of the baseline: the program may have been
measured with changes that were committed later, or never, and a shallow clone has another commit
for the one that is meant.
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
from gpuprobe.analysis.compare.naming import SITE_PACKAGES

if TYPE_CHECKING:
    from gpuprobe.analysis.baseline import Baseline

_SECONDS: Final = 30
"""git is given so long for one answer: a disk of a network may never give it."""

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
"""Files that a program is set up with, by the ends of their names."""


@dataclass(frozen=True, slots=True)
class BaselineHistory:
    """``baseline``: with the text of its sources, as far as the commit has them. ``settings``: the
    files that are not Python, and were changed since; names relative to the project."""

    commit: str
    baseline: Baseline
    settings: tuple[str, ...] = ()


def history(
    before: Baseline, path: str | os.PathLike[str], root: str, now: Mapping[str, Source]
) -> BaselineHistory | None:
    """What the repository of the project in ``root`` knows of the baseline in the file ``path``;
    None where there is none, no git, or the file was never committed. ``now``: the sources of
    today, whose names are taken where the baseline has none (one of an earlier version).
    """
    folder = root or str(Path.cwd())
    file = os.path.realpath(path)
    found = _git(folder, "log", "-1", "--format=%H %P", "--", file)
    commit, *parents = found.decode().split() if found else [""]
    if not commit:
        return None
    sources: dict[str, Source] = dict(before.sources)
    if sources or _is_of(folder, file, whole=bool(parents)):
        names = list(sources) or [name for name in now if not name.startswith(_ELSEWHERE)]
        for name, text in _texts(folder, commit, names).items():
            source = source_of(text)
            if name not in sources or sources[name].statements == source.statements:
                sources[name] = source
    return BaselineHistory(commit, replace(before, sources=sources), _changed(folder, commit, file))


_ELSEWHERE: Final = (SITE_PACKAGES, ".../", "<")


def _is_of(folder: str, file: str, *, whole: bool) -> bool:
    """Whether the baseline is as it was committed, in a commit that is not merely the first one
    that a shallow clone has."""
    if _git(folder, "diff", "--quiet", "HEAD", "--", file) is None:
        return False
    return whole or _git(folder, "rev-parse", "--is-shallow-repository") == b"false\n"


def _texts(folder: str, commit: str, names: Sequence[str]) -> dict[str, str]:
    """The files of a commit, as text; names are relative to the folder."""
    wanted = [name for name in names if "\n" not in name and "\0" not in name]
    asked = "".join(f"{commit}:./{name}\n" for name in wanted)
    answer = _git(folder, "cat-file", "--batch", stdin=asked.encode("utf-8", "surrogateescape"))
    found: dict[str, str] = {}
    at = 0
    for name in wanted if answer is not None else ():
        assert answer is not None
        end = answer.find(b"\n", at)
        words = answer[at:end].split()
        at = end + 1
        if len(words) != 3 or words[1] not in (b"blob", b"tree", b"commit", b"tag"):
            continue  # missing
        size = int(words[2])
        text = answer[at : at + size]
        at += size + 1
        if words[1] == b"blob":
            found[name] = text.decode("utf-8", "replace")
    return found


def committed_texts(
    found: BaselineHistory, known: Mapping[str, KeptFile], wanted: Iterable[str], root: str
) -> dict[str, str]:
    """The texts of files as they were when the baseline was committed, by name. ``known``: files of
    the baseline, whose digests they must have."""
    texts = _texts(root or str(Path.cwd()), found.commit, sorted(wanted))
    return {
        name: text
        for name, text in texts.items()
        if name not in known or known[name].digest == file_digest(text)
    }


def _changed(folder: str, commit: str, file: str) -> tuple[str, ...]:
    """The files that set programs up, and are others now than in the commit; not ``file``."""
    answer = _git(
        folder, "diff", "--name-only", "--relative", "-z", "--no-ext-diff", commit, "--", "."
    )
    names = (answer or b"").decode("utf-8", "replace").split("\0")
    return tuple(
        name
        for name in names
        if name.endswith(_SETTINGS) and os.path.realpath(Path(folder, name)) != file
    )


def _git(folder: str, *arguments: str, stdin: bytes = b"") -> bytes | None:
    """What git answers; None where it fails, or there is none."""
    # A hook of git's own (pre-push) names its repository in these, relative to another folder.
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
