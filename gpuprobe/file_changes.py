"""Which files Python's functions, and `torch.save`, are about to change: from audit events."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from gpuprobe.patching import patch

Changes = Iterator[tuple[Any, bool]]
"""Paths that are changed, and whether the content of the file itself is needed."""


def changes_of(event: str, arguments: Sequence[Any]) -> Changes:
    """The paths that an audit event (`sys.addaudithook`) is about to change.

    Raises TypeError or ValueError for arguments that name no path.
    """
    paths = _PATHS.get(event)
    return iter(()) if paths is None else paths(arguments)


def wrap_torch_writer(before: Callable[[str], str | None]) -> Callable[[], None]:
    """Call ``before`` with each path that torch's own writer opens in C++, without an audit event;
    it may return another one to write instead. Returns a function that ends it.
    """
    torch: Any = sys.modules.get("torch")
    if torch is None:
        return lambda: None
    original = torch._C.PyTorchFileWriter

    def writer(file: Any, *arguments: Any, **options: Any) -> Any:
        if isinstance(file, (str, os.PathLike)):
            file = before(os.fspath(file)) or file
        return original(file, *arguments, **options)

    return patch(torch._C, "PyTorchFileWriter", writer)


def _opened(arguments: Sequence[Any]) -> Changes:
    path, mode, flags = arguments
    if isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC):
        emptied = flags & os.O_TRUNC or (isinstance(mode, str) and mode[:1] in "wx")
        yield path, not emptied


def _first(arguments: Sequence[Any]) -> Changes:
    yield arguments[0], True


def _entries(arguments: Sequence[Any]) -> Changes:
    """Of entries only their folders change."""
    for path in arguments:
        if isinstance(path, (str, bytes, os.PathLike)):
            yield Path(os.path.abspath(os.fsdecode(path))).parent, True  # noqa: PTH100


_PATHS: Final[dict[str, Callable[[Sequence[Any]], Changes]]] = {
    "open": _opened,
    "os.mkdir": _first,
    "os.rename": _entries,
    "os.link": lambda arguments: _entries(arguments[1:]),
    "os.symlink": lambda arguments: _entries(arguments[1:]),
    "os.remove": _entries,
    "os.rmdir": _entries,
    "shutil.rmtree": _first,
    "os.truncate": _first,
    "os.chmod": _first,
    "os.chown": _first,
    "os.utime": _first,
    "sqlite3.connect": _first,
}
"""By the name of the event: https://docs.python.org/3/library/audit_events.html."""
