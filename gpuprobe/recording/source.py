"""The source lines of a recorded program, read from this machine's disk."""

from __future__ import annotations

import stat
from dataclasses import dataclass
from pathlib import Path

from gpuprobe.model.io.files import read_regular
from gpuprobe.model.trace import Frame
from gpuprobe.model.values import ReadStatus, Unavailable

_MOST_SOURCE = 4 << 20
"""Bytes of a source file that are read at most."""


@dataclass(frozen=True, slots=True)
class Excerpt:
    """Lines of a source file around ``line``: (number, text). ``changed``: the file is newer
    than the recording, so the text may not be what ran.
    """

    path: str
    line: int
    lines: tuple[tuple[int, str], ...]
    changed: bool


def excerpt(
    frame: Frame, *, cwd: str = "", since: float = 0.0, around: int = 3
) -> Excerpt | Unavailable:
    """The source of a frame, read now from this machine's disk. ``cwd`` is where relative names
    begin, ``since`` when the recording was made (seconds since the Unix epoch, 0: not known).

    Recordings come from anywhere, so what is read is a regular file named ``.py``, and only the
    lines asked for are kept.
    """
    path = Path(frame.filename)
    if not frame.filename.endswith(".py"):
        return Unavailable("not a Python file", ReadStatus.UNSUPPORTED)
    if not path.is_absolute():
        path = Path(cwd) / path
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode) or status.st_size > _MOST_SOURCE:
            return Unavailable("not a source file")
        text = read_regular(path, most=_MOST_SOURCE).decode("utf-8", "replace").splitlines()
    except (OSError, ValueError) as error:
        return Unavailable(getattr(error, "strerror", None) or str(error))
    if not 1 <= frame.line <= len(text):
        return Unavailable(f"the file has {len(text)} lines")
    low, high = max(1, frame.line - around), min(len(text), frame.line + around)
    lines = tuple((number, text[number - 1]) for number in range(low, high + 1))
    return Excerpt(str(path), frame.line, lines, bool(since) and status.st_mtime > since)
