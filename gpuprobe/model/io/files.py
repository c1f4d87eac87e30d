"""Writing a file that appears under its name only when it is complete."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from gpuprobe.errors import UsageError


def is_special(path: Path) -> bool:
    """Whether something is there that is neither a file nor a folder: a device, a pipe. Such a
    thing is written to; to put a file in its place would break it for everybody else.
    """
    try:
        mode = path.stat().st_mode
    except OSError:
        return False
    return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))


@contextmanager
def new_file(path: str | os.PathLike[str], force: bool) -> Iterator[IO[bytes]]:
    """A stream to write the file with; a device or a pipe is written to as it is. Where ``path``
    is a link, ``force`` replaces what it leads to.

    Raises UsageError where ``path`` exists (unless ``force``) or cannot be written.
    """
    where = Path(path)
    try:
        if is_special(where):
            with where.open("wb") as stream:
                yield stream
        else:
            with atomic_write(where, replace=force) as stream:
                yield stream
    except FileExistsError as error:
        raise UsageError(f"{where} exists", hint="--force replaces it") from error
    except OSError as error:
        raise UsageError(f"cannot write {where}: {error.strerror or error}") from error


@contextmanager
def atomic_write(
    path: Path, *, replace: bool = True, private: bool = False, temporary: Path | None = None
) -> Iterator[IO[bytes]]:
    """A stream whose bytes become the file ``path``, whole, when the block ends, and are dropped
    where it raises. Where ``path`` is a link, the file that it leads to is written.

    Without ``replace`` a file that is there stays, and FileExistsError is raised. ``private``:
    only the owner may read it. ``temporary`` is where the bytes are until then, by default a name
    in the same folder that cannot be guessed, so that nobody else there can have a link of that
    name waiting. Raises OSError.
    """
    if not replace and (path.exists() or path.is_symlink()):
        raise FileExistsError(path)
    target = Path(os.path.realpath(path))
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    if temporary is None:
        temporary = target.with_name(f".{path.name[:100]}.{os.urandom(8).hex()}")
        flags |= os.O_EXCL
    handle = os.open(temporary, flags, 0o600 if private else 0o666)
    try:
        try:
            with os.fdopen(handle, "wb", closefd=False) as stream:
                yield stream
                if not stream.closed:
                    stream.flush()
        finally:
            os.close(handle)
        if replace:
            temporary.replace(target)
        else:
            _take_name(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)  # gives a full disk its space back


def _take_name(temporary: Path, target: Path) -> None:
    """Fails with FileExistsError where the name was taken meanwhile."""
    try:
        os.link(temporary, target)
    except FileExistsError:
        raise
    except OSError:
        # A file system without hard links (exFAT, SMB): the name is taken first, then replaced.
        os.close(os.open(target, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
        temporary.replace(target)
