"""Which files Python's functions, and `torch.save`, are about to change: from audit events."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, Final

from gpuprobe.patching import patch
from gpuprobe.user_frames import Owner, name_of, owner_of

_MACHINERY: Final = ("importlib", "multiprocessing", "torch._dynamo", "torch._inductor", "triton")
"""Modules whose files are caches and queues."""

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


def is_programs_doing(own: Sequence[str], *, otherwise: bool) -> bool:
    """Whether the program is what changes a file now, itself or through a library. ``own``: modules
    of gpuprobe through which the change is reported. ``otherwise``: for a stack without a frame of
    the user, as in a thread of a library.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        owner = owner_of(name_of(frame.f_code.co_filename))
        module = str(frame.f_globals.get("__name__", ""))
        if owner is Owner.USER:
            return True
        if module.startswith(_MACHINERY):
            return False
        if owner is Owner.GPUPROBE and module != __name__ and module not in own:
            return False
        frame = frame.f_back
    return otherwise


def _opened(arguments: Sequence[Any]) -> Changes:
    path, mode, flags = arguments
    if isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC):
        emptied = flags & os.O_TRUNC or (isinstance(mode, str) and mode[:1] in "wx")
        yield path, not emptied


def _first(arguments: Sequence[Any]) -> Changes:
    yield arguments[0], True


def _first_in(arguments: Sequence[Any]) -> Changes:
    """The last argument may be the descriptor of the folder that the path is relative to."""
    yield _in_folder(arguments[0], arguments[-1]), True


def _entries(arguments: Sequence[Any]) -> Changes:
    """Of entries only their folders change. The descriptors of folders come last."""
    paths = [path for path in arguments if isinstance(path, (str, bytes, os.PathLike))]
    folders = [number for number in arguments if isinstance(number, int)][-len(paths) :]
    for at, path in enumerate(paths):
        folder = folders[at] if len(folders) == len(paths) else None
        whole = os.path.abspath(os.fsdecode(_in_folder(path, folder)))  # noqa: PTH100
        yield Path(whole).parent, True


def _in_folder(path: Any, folder: Any) -> Any:
    """A path that is relative to a folder, of which ``folder`` may be the descriptor."""
    if not isinstance(folder, int) or folder < 0 or isinstance(path, int):
        return path
    text = os.fsdecode(path)
    if os.path.isabs(text):  # noqa: PTH117
        return path
    try:
        return Path(os.readlink(f"/proc/self/fd/{folder}"), text)  # noqa: PTH115
    except OSError:
        return path


_PATHS: Final[dict[str, Callable[[Sequence[Any]], Changes]]] = {
    "open": _opened,
    "os.mkdir": _first_in,
    "os.rename": _entries,
    "os.link": lambda arguments: _entries(arguments[1:]),
    "os.symlink": lambda arguments: _entries(arguments[1:]),
    "os.remove": _entries,
    "os.rmdir": _entries,
    "shutil.rmtree": _first_in,
    "os.truncate": _first,
    "os.chmod": _first_in,
    "os.chown": _first_in,
    "os.utime": _first_in,
    "sqlite3.connect": _first,
}
"""By the name of the event: https://docs.python.org/3/library/audit_events.html."""
