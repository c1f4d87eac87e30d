"""Writing a file that appears under its name only when it is complete."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from gpuprobe.errors import UsageError

__all__ = ["is_special", "new_file"]


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
    """A stream to write the file with. Where ``path`` is a link, ``force`` replaces what it leads
    to. Raises UsageError where ``path`` exists (unless ``force``) or cannot be written.
    """
    where = Path(path)
    try:
        if is_special(where):
            with where.open("wb") as stream:
                yield stream
            return
        if not force and (where.exists() or where.is_symlink()):
            raise FileExistsError
        target = Path(os.path.realpath(where))
        # Its name cannot be guessed, so that nobody else in the directory can have a link of
        # that name waiting.
        handle, name = tempfile.mkstemp(prefix=f".{where.name[:100]}.", dir=target.parent)
        temporary = Path(name)
        try:
            try:
                with os.fdopen(handle, "wb", closefd=False) as stream:
                    yield stream
                    if not stream.closed:
                        stream.flush()
            finally:
                os.close(handle)
            umask = os.umask(0)
            os.umask(umask)
            temporary.chmod(0o666 & ~umask)  # mkstemp makes files that only their owner can read
            if force:
                temporary.replace(target)
            else:
                _take_name(temporary, target)
        finally:
            temporary.unlink(missing_ok=True)
    except FileExistsError as error:
        raise UsageError(f"{where} exists", hint="--force replaces it") from error
    except OSError as error:
        raise UsageError(f"cannot write {where}: {error.strerror or error}") from error


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
