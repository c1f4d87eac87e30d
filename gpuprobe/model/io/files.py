"""Opening files that may be anything, and writing a file that appears only when it is complete."""

from __future__ import annotations

import errno
import gc
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from os import close as os_close
from os import fstat
from os import open as os_open
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


MOST_DOCUMENT = 64 << 20
"""Bytes of a document (a baseline, a configuration, a catalogue) that are read at most. Those that
gpuprobe writes have some kilobytes; the largest baseline of the tests has 40."""

_KINDS = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
    (stat.S_ISLNK, "a link"),
)


def open_regular(path: str | os.PathLike[str], *, inside: bool = False) -> IO[bytes]:
    """Open a regular file to be read; what blocks, or never ends, is not opened at all.

    ``inside``: the file belongs to the folder it is in, which may come from elsewhere, so a link
    that leads out of that folder is not followed. Raises OSError, whose message names what is there
    instead of a file.
    """
    where = os.fspath(path)
    if "\0" in where:
        raise OSError(errno.EINVAL, "no file's name has a null byte", where)
    flags = os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NONBLOCK", 0)
    if inside and Path(where).is_symlink():
        target = os.path.realpath(where)
        # Lexically: the folder itself may be reached through links.
        if os.path.dirname(target) != os.path.realpath(os.path.dirname(where) or "."):  # noqa: PTH120
            raise OSError(errno.EPERM, "it is a link out of its folder", where)
        where = target
    if inside:
        flags |= getattr(os, "O_NOFOLLOW", 0)
    # Before it is opened, as opening alone can have an effect on a device.
    _refuse_special(os.stat(where), where)  # noqa: PTH116
    descriptor = os_open(where, flags)
    try:
        _refuse_special(fstat(descriptor), where)
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os_close(descriptor)
        raise


def _refuse_special(status: os.stat_result, where: str) -> None:
    if stat.S_ISREG(status.st_mode):
        return
    what = next((name for is_it, name in _KINDS if is_it(status.st_mode)), "something else")
    raise OSError(errno.EINVAL, f"it is {what}, not a file", where)


_MOST_PARTS = 10_000
"""Stretches of data, with holes between them, that are counted: files that programs write have one,
what was lost in a crash leaves a few holes."""

_MOST_HOLES = 16 << 20
"""Bytes of holes in a file that is read. What a crash leaves behind has fewer."""


def stored_bytes(descriptor: int) -> int:
    """The bytes of an open file that are really there, not holes, which are read as zeros: a file
    of a few bytes can have a size of terabytes. What reading it may take is proportional to these.

    A file system that does not report holes reports data throughout, as does one that compresses:
    then it is the size. The offset is left at the start. Raises OSError.
    """
    size = fstat(descriptor).st_size
    if not hasattr(os, "SEEK_DATA"):  # pragma: no cover - Windows
        return size
    found = end = 0
    try:
        for _ in range(_MOST_PARTS):
            start = os.lseek(descriptor, end, os.SEEK_DATA)
            end = os.lseek(descriptor, start, os.SEEK_HOLE)
            found += end - start
    except OSError as error:
        if error.errno != errno.ENXIO:  # there is no more data; else it cannot be known
            found = size
    os.lseek(descriptor, 0, os.SEEK_SET)
    return min(found, size)


def refuse_holes(file: IO[bytes]) -> None:
    """Raise OSError for a file that is mostly holes: reading them takes as long as reading data.
    The file is at its start.
    """
    size = fstat(file.fileno()).st_size
    if size > _MOST_HOLES and size - stored_bytes(file.fileno()) > _MOST_HOLES:
        raise OSError(
            errno.EFBIG,
            f"it has {size} bytes, of which {stored_bytes(file.fileno())} are stored",
            file.name,
        )


def read_regular(
    path: str | os.PathLike[str], *, most: int = MOST_DOCUMENT, inside: bool = False
) -> bytes:
    """The bytes of a regular file of ``most`` bytes at most. Raises OSError as `open_regular`, and
    for a larger one, of which nothing is read."""
    with open_regular(path, inside=inside) as file:
        size = fstat(file.fileno()).st_size
        if size <= most:
            refuse_holes(file)
        data = file.read(most + 1) if size <= most else b""
    if size > most or len(data) > most:
        size = max(size, len(data))
        raise OSError(
            errno.EFBIG, f"it has {size} bytes, and no such file has more than {most}", str(path)
        )
    return data


def read_text(path: str | os.PathLike[str], *, most: int = MOST_DOCUMENT) -> str:
    """The text of a document. Raises OSError as `read_regular`, and UnicodeDecodeError."""
    return read_regular(path, most=most).decode("utf-8").replace("\r\n", "\n")


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

    Without ``replace`` an existing file is kept and FileExistsError is raised. ``private``: only
    the owner may read it. ``temporary`` is the file that is written first, by default a name in the
    same folder that cannot be guessed, so that no other user can have a link of that name waiting.
    Raises OSError.
    """
    if not replace and (path.exists() or path.is_symlink()):
        raise FileExistsError(path)
    target = Path(os.path.realpath(path))
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    if temporary is None:
        temporary = target.with_name(f".{path.name[:100]}.{os.urandom(8).hex()}")
        flags |= os.O_EXCL
    handle = os_open(temporary, flags, 0o600 if private else 0o666)
    try:
        try:
            with os.fdopen(handle, "wb", closefd=False) as stream:
                yield stream
                if not stream.closed:
                    stream.flush()
        finally:
            os_close(handle)
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
        os_close(os_open(target, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
        temporary.replace(target)


@contextmanager
def gc_paused() -> Iterator[None]:
    """No garbage collection: millions of new containers make it walk all there are again and
    again, with nothing else running.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
