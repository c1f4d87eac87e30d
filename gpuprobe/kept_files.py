"""Files that exist when a program starts, and that a run for a few steps must not replace.

A program that an estimate or an explanation runs trains for a few steps: its checkpoints, logs and
settings would replace those of a training. Inside `KeptFiles.keep`, what the program writes to a
file that is older goes to a copy, which it reads again by the same path, and which is removed at
the end; what it deletes stays. New files are written as they are.

This covers Python's functions, `torch.save` and safetensors, not what other libraries write in C++.
"""

from __future__ import annotations

import builtins
import io
import os
import pathlib
import shutil
import stat
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

from gpuprobe.clocks import time
from gpuprobe.file_changes import is_programs_doing, wrap_torch_writer
from gpuprobe.patching import Patches, when_imported

_MOST_COPIED: Final = 256 << 20
"""Bytes of a file that is copied to be changed; a larger one is changed in place: a data set that
is mapped with NumPy's default mode, in which nothing is written."""
_MOST_NAMED: Final = 3
_WRITES: Final = os.O_WRONLY | os.O_RDWR
_ROOM: Final = 4
"""How many times the size of a file its copy may need of the folder for temporary files."""


class KeptFiles:
    """Keeps the files that are older than this object, inside `keep`."""

    def __init__(self) -> None:
        self._began = time()
        self._folder = ""
        self._copies: dict[str, str] = {}  # what is written instead, by the real path
        self._deleted: set[str] = set()  # folders that the program deleted
        self._kept: dict[str, str] = {}  # as the program names them
        self._in_place: dict[str, str] = {}

    @property
    def notes(self) -> tuple[str, ...]:
        """What was kept, and what may not have been."""
        kept = list(self._kept.values())[:_MOST_NAMED]
        more = len(self._kept) - len(kept)
        texts = [discarded(path) for path in kept]
        if more > 0:
            texts.append(f"the same for {more} other files that existed before")
        texts += [
            f"{path} was opened to be changed in place, which is not prevented"
            for path in self._in_place.values()
        ]
        return tuple(texts)

    @contextmanager
    def keep(self) -> Iterator[None]:
        """Inside, older files are kept."""
        patches = Patches()
        opened, os_open = io.open, os.open

        def open_instead(file: Any, mode: Any = "r", *arguments: Any, **options: Any) -> Any:
            if options.get("opener") is None and len(arguments) < 6 and isinstance(mode, str):
                written, kept = bool(set(mode) & set("wa+")), "w" not in mode
                file = self._opened(file, mode, written and "x" not in mode, kept)
            return opened(file, mode, *arguments, **options)

        def os_open_instead(path: Any, flags: int, *arguments: Any, **options: Any) -> int:
            if options.get("dir_fd") is None:
                written = bool(flags & _WRITES) and not flags & os.O_EXCL
                path = self._opened(path, None, written, not flags & os.O_TRUNC)
            return os_open(path, flags, *arguments, **options)

        patches.set(builtins, "open", open_instead)
        patches.set(shutil, "rmtree", self._deleting(shutil.rmtree))
        changes: dict[str, Callable[..., Any]] = {
            "open": os_open_instead,
            "mkdir": self._making(os.mkdir),
            **{name: self._renaming(getattr(os, name)) for name in ("rename", "replace")},
            **{name: self._removing(getattr(os, name)) for name in ("remove", "unlink")},
            **{name: self._changing(getattr(os, name)) for name in ("utime", "chmod")},
        }
        patches.set_each(os, changes)
        patches.set(io, "open", open_instead)
        of_paths = getattr(pathlib, "_NormalAccessor", None)  # Python 3.10 has its own references
        for name, change in {**changes, "open": open_instead}.items():
            if name in vars(of_paths or object):
                patches.set(of_paths, name, staticmethod(change))
        ends = [
            when_imported("torch", lambda: patches.add(wrap_torch_writer(self._unwritten))),
            when_imported("safetensors.torch", lambda: self._wrap_safetensors(patches)),
        ]
        try:
            yield
        finally:
            for end in ends:
                end()
            patches.undo()
            if self._folder:
                shutil.rmtree(self._folder, ignore_errors=True)

    # -- what is kept

    def _is_kept(self, path: str) -> bool:
        """Whether the program is about to change a file with a content from before."""
        try:
            found = os.stat(path)  # noqa: PTH116 - Path's opens nothing else, but costs more
        except OSError:
            return False
        old = stat.S_ISREG(found.st_mode) and found.st_size > 0 and found.st_mtime < self._began
        return old and is_programs_doing((__name__,), otherwise=True)

    def _keep(self, path: str, named: Any) -> None:
        """Note that a file or folder is kept."""
        self._kept.setdefault(path, os.fsdecode(named))

    def _copy_of(self, path: str, named: Any, *, content: bool) -> str | None:
        """The file to change instead, with its ``content``; None if that is too large."""
        size = Path(path).stat().st_size
        if content and size > _MOST_COPIED:
            self._in_place.setdefault(path, os.fsdecode(named))
            return None
        if not self._folder:
            self._folder = tempfile.mkdtemp(prefix="gpuprobe-kept-")
        self._keep(path, named)
        if not content and shutil.disk_usage(self._folder).free < _ROOM * size:
            return os.devnull
        copy = str(Path(self._folder, f"{len(self._kept)}-{Path(path).name}"))
        if content:
            shutil.copyfile(path, copy)
        self._copies[path] = copy
        return copy

    def _unwritten(self, path: str) -> str | None:
        """Where torch's writer, which opens the path itself, writes a checkpoint: nowhere, for one
        that is older.
        """
        return os.devnull if self._keeps(path) else None

    def _keeps(self, path: Any) -> bool:
        """Whether a library must not write to a path."""
        whole = _real(path)
        if whole is None or not self._is_kept(whole):
            return False
        self._keep(whole, path)
        return True

    # -- what replaces Python's functions

    def _opened(self, file: Any, mode: str | None, written: bool, content: bool) -> Any:
        """What is opened instead of ``file``, which is ``written``: with or without its old
        ``content``.
        """
        if not written and not self._copies:
            return file
        path = _real(file)
        if path is None:
            return file
        copy = self._copies.get(path)
        if written and (copy is not None or self._is_kept(path)):
            sys.audit("open", file, mode, os.O_RDWR | (0 if content else os.O_TRUNC))
            copy = copy or self._copy_of(path, file, content=content)
        return copy or file

    def _renaming(self, rename: Callable[..., None]) -> Callable[..., None]:
        def instead(src: Any, dst: Any, **options: Any) -> None:
            old, new = _real(src), _real(dst)
            if any(one is not None for one in options.values()) or old is None or new is None:
                return rename(src, dst, **options)
            source = self._copies.get(old, old)
            kept = old not in self._copies and self._is_kept(old)
            replaced = new in self._copies or self._is_kept(new)
            if not (kept or replaced or source != old):
                return rename(src, dst)
            sys.audit("os.rename", src, dst, -1, -1)
            target: str | None = new
            if replaced:
                target = self._copies.get(new) or self._copy_of(new, dst, content=False)
            assert target is not None
            if kept:
                self._keep(old, src)
                if target != os.devnull:
                    shutil.copy2(old, target)
                return None
            if target != os.devnull:
                shutil.move(source, target)
            self._copies.pop(old, None)
            return None

        return instead

    def _removing(self, remove: Callable[..., None]) -> Callable[..., None]:
        def instead(path: Any, **options: Any) -> None:
            whole = None if options.get("dir_fd") is not None else _real(path)
            if whole is not None and not Path(os.fsdecode(path)).is_symlink():
                copy = self._copies.pop(whole, None)
                if copy is not None:
                    return remove(copy)
                if self._is_kept(whole):
                    sys.audit("os.remove", path, -1)
                    self._keep(whole, path)
                    return None
            return remove(path, **options)

        return instead

    def _changing(self, change: Callable[..., None]) -> Callable[..., None]:
        def instead(path: Any, *arguments: Any, **options: Any) -> None:
            whole = _real(path) if self._kept else None
            copy = self._copies.get(whole or "")
            if copy is not None or whole not in self._kept:
                change(path if copy is None else copy, *arguments, **options)

        return instead

    def _making(self, make: Callable[..., None]) -> Callable[..., None]:
        def instead(path: Any, *arguments: Any, **options: Any) -> None:
            whole = _real(path) if self._deleted else None
            if whole not in self._deleted:
                make(path, *arguments, **options)
            elif whole is not None:
                self._deleted.discard(whole)

        return instead

    def _deleting(self, delete: Any) -> Any:
        def instead(path: Any, *arguments: Any, **options: Any) -> None:
            whole = None if options.get("dir_fd") is not None else _real(path)
            if whole is None or not self._has_kept(whole):
                delete(path, *arguments, **options)
                return
            sys.audit("shutil.rmtree", path, None)
            self._keep(whole, path)
            self._deleted.add(whole)

        instead.avoids_symlink_attacks = delete.avoids_symlink_attacks  # type: ignore[attr-defined]
        return instead

    def _has_kept(self, folder: str) -> bool:
        """Whether a folder has a file that is kept, at any depth."""
        return any(
            self._is_kept(str(Path(inner, name)))
            for inner, _, names in os.walk(folder)
            for name in names
        )

    def _wrap_safetensors(self, patches: Patches) -> None:
        module: Any = sys.modules["safetensors.torch"]
        serialize = module.serialize_file

        def instead(tensors: Any, filename: Any, *arguments: Any, **options: Any) -> None:
            # Never to a device: it replaces what has the name by another file.
            if not self._keeps(filename):
                serialize(tensors, filename, *arguments, **options)

        patches.set(module, "serialize_file", instead)


def discarded(path: str) -> str:
    """The note about a file that is kept."""
    return f"{path} is kept: what the program writes there is discarded"


def _real(path: Any) -> str | None:
    """The real path; None for a descriptor and for what names no path."""
    if not isinstance(path, (str, bytes, os.PathLike)):
        return None
    with suppress(OSError, ValueError):
        return os.path.realpath(os.fsdecode(path))
    return None
