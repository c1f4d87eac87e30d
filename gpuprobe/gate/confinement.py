"""Keeps what a tried program writes in its copy of the project.

The kernel refuses all other writes (Landlock, Linux 5.13): also those of C++ libraries and of
processes that the program starts. Where the copy has a link to the project's own file or folder,
Python's functions that write replace it by a copy first, and `torch.save` does.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import struct
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from gpuprobe.errors import EnvironmentUnavailable
from gpuprobe.file_changes import changes_of, wrap_torch_writer

_CREATE_RULESET: Final = 444
_ADD_RULE: Final = 445
_RESTRICT_SELF: Final = 446
"""System calls, equal on all architectures (include/uapi/asm-generic/unistd.h)."""

_NO_NEW_PRIVILEGES: Final = 38
_WRITE_FILE: Final = 1 << 1
_TRUNCATE: Final = 1 << 14
_CHANGES: Final = (
    (1, _WRITE_FILE | 0x1FF0),  # removes and makes entries of folders
    (2, 1 << 13),  # links and renames across folders
    (3, _TRUNCATE),
)
"""Rights that are refused, by the version of Landlock that has them: ``linux/landlock.h``."""

_DEVICES: Final = ("null", "zero", "full", "random", "urandom", "tty", "ptmx", "pts", "shm")
_OF_GPUS: Final = ("nvidia", "dri", "infiniband", "kfd")
_MOST_COPIED: Final = 256 << 20  # bytes of a file that is copied before it is changed
_MOST_ENTRIES: Final = 5_000  # of a folder


def landlock_version() -> int:
    """The version of the kernel's Landlock, 0 without it."""
    if sys.platform != "linux":
        return 0
    return max(0, int(ctypes.CDLL(None).syscall(_CREATE_RULESET, None, 0, 1)))


def require_landlock() -> None:
    """Raises EnvironmentUnavailable if this system cannot confine a program."""
    if not landlock_version():
        raise EnvironmentUnavailable(
            "this system cannot keep a program from writing outside its copy (no Landlock)"
        )


class Confinement:
    """The confinement of this process to a copy of a project, from `start` to the process's end.

    ``outside``: the first path that the program tried to change outside its folder.
    """

    def __init__(self, folder: str, tree: str) -> None:
        """``folder``: the only one that is writable; ``tree``: the copy of the project, in it."""
        self._folder = Path(os.path.realpath(folder))
        self._tree = Path(os.path.realpath(tree))
        self._inside = threading.local()
        self.outside = ""

    def start(self) -> None:
        """Raises EnvironmentUnavailable if the kernel does not confine the process."""
        temporary = self._folder / "tmp"
        temporary.mkdir(exist_ok=True)
        os.environ["TMPDIR"] = str(temporary)
        tempfile: Any = sys.modules.get("tempfile")
        if tempfile is not None:
            tempfile.tempdir = None
        sys.dont_write_bytecode = True
        _refuse_writes(self._folder)
        sys.addaudithook(self._event)
        wrap_torch_writer(lambda path: self.make_own(path, keep=False))

    def _event(self, event: str, arguments: Sequence[Any]) -> None:
        if getattr(self._inside, "busy", False):
            return
        with suppress(TypeError, ValueError, OSError):  # a descriptor, or an invalid argument
            for path, keep in changes_of(event, arguments):
                if event != "os.mkdir" or not Path(path).is_dir():  # makedirs(exist_ok=True)
                    self.make_own(os.fsdecode(path), keep=keep)

    def make_own(self, path: str, *, keep: bool) -> None:
        """Before ``path`` is changed: replace links to the project by copies. ``keep``: the content
        of the file itself is needed.
        """
        self._inside.busy = True
        try:
            whole = Path(os.path.abspath(path))  # noqa: PTH100 - links are what is replaced
            if self._tree in whole.parents:
                self._make_own(whole, keep)
            elif not self.outside and not self._is_writable(Path(os.path.realpath(whole))):
                self.outside = str(whole)
        finally:
            self._inside.busy = False

    def _make_own(self, whole: Path, keep: bool) -> None:
        here = self._tree
        for part in whole.relative_to(here).parts:
            here /= part
            if not here.is_symlink():
                continue
            if self._folder in Path(os.path.realpath(here)).parents:
                return  # a link of the program
            if here.is_dir():
                _link_entries(here)
            elif here == whole:
                _copy_file(here, keep)

    def _is_writable(self, path: Path) -> bool:
        """Whether the kernel allows changes there."""
        if (
            path == self._folder
            or self._folder in path.parents
            or path.is_relative_to("/proc/self/fd")
        ):
            return True
        parts = path.parts[:3]
        return parts[:2] == ("/", "dev") and parts[-1].startswith((*_DEVICES, *_OF_GPUS))


def _refuse_writes(folder: Path) -> None:
    """Make the kernel refuse changes outside ``folder`` and the devices, in this process and those
    that it starts. Raises EnvironmentUnavailable if it does not.
    """
    version = landlock_version()
    rights = sum(right for since, right in _CHANGES if since <= version)
    libc = ctypes.CDLL(None, use_errno=True)

    def call(number: int, *arguments: Any) -> int:
        done = int(libc.syscall(number, *arguments))
        if done < 0:
            reason = os.strerror(ctypes.get_errno())
            raise EnvironmentUnavailable(f"the process cannot be confined to a folder: {reason}")
        return done

    rules = call(_CREATE_RULESET, struct.pack("Q", rights), 8, 0)
    devices = Path("/dev")
    allowed = [folder, *(devices / name for name in _DEVICES)]
    allowed += [path for name in _OF_GPUS for path in devices.glob(f"{name}*")]
    for path in allowed:
        with suppress(OSError):  # a device that this machine lacks
            descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
            try:
                given = rights if path.is_dir() else rights & (_WRITE_FILE | _TRUNCATE)
                call(_ADD_RULE, rules, 1, struct.pack("=Qi", given, descriptor), 0)
            finally:
                os.close(descriptor)
    if libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0):
        raise EnvironmentUnavailable("the process cannot give up privileges")
    call(_RESTRICT_SELF, rules, 0)
    os.close(rules)


def _link_entries(link: Path) -> None:
    """Replace a link to a folder by a folder with links to its entries."""
    entries = list(Path(os.path.realpath(link)).iterdir())
    if len(entries) > _MOST_ENTRIES:
        return  # the kernel refuses the write
    link.unlink()
    link.mkdir()
    for entry in entries:
        (link / entry.name).symlink_to(os.path.realpath(entry))


def _copy_file(link: Path, keep: bool) -> None:
    """Replace a link to a file by a copy, or by nothing."""
    target = Path(os.path.realpath(link))
    copied = keep and target.exists()
    if copied and target.stat().st_size > _MOST_COPIED:
        return  # the kernel refuses the write
    link.unlink()
    if copied:
        shutil.copy2(target, link)
