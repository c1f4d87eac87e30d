"""Bytecode of gpuprobe's modules that are imported while a program runs.

Python writes it (``.pyc``) in the process that imports first, under that program's limits and on
whatever disk there is. Where only part of it can be written, Python keeps that part (CPython issue
126606), and each later import of the module fails: one program with a limit of file sizes would
break gpuprobe for all others. Here it is written whole or not at all.
"""

from __future__ import annotations

import os
import sys
from importlib.machinery import (
    BYTECODE_SUFFIXES,
    SOURCE_SUFFIXES,
    FileFinder,
    ModuleSpec,
    SourceFileLoader,
    SourcelessFileLoader,
)
from io import FileIO
from os import getpid, makedirs, replace, unlink
from types import ModuleType
from typing import Any

if sys.platform == "win32":

    def _limited() -> bool:
        return False

else:
    from resource import RLIM_INFINITY, RLIMIT_FSIZE, getrlimit

    def _limited() -> bool:
        """Whether the process has a limit of file sizes: a write beyond it sends a signal, too."""
        return getrlimit(RLIMIT_FSIZE)[0] != RLIM_INFINITY


class _Loader(SourceFileLoader):
    def set_data(self, path: str, data: Any, *, _mode: int = 0o666) -> None:
        if _limited():
            return
        temporary = f"{path}.{getpid()}"
        try:
            makedirs(path.rpartition(os.sep)[0], exist_ok=True)
            with FileIO(temporary, "xb") as file:
                try:
                    if file.write(data) == len(data):
                        replace(temporary, path)
                        return
                except OSError:
                    unlink(temporary)
                    raise
            unlink(temporary)
        except OSError:  # as in Python: it is compiled again next time
            return


class _Finder(FileFinder):
    """Finds modules in one folder of gpuprobe's."""

    def __init__(self, folder: str) -> None:
        super().__init__(
            folder, (_Loader, SOURCE_SUFFIXES), (SourcelessFileLoader, BYTECODE_SUFFIXES)
        )

    def find_spec(self, fullname: str, target: ModuleType | None = None) -> ModuleSpec | None:
        spec = super().find_spec(fullname, target)
        for folder in (spec and spec.submodule_search_locations) or ():
            _find_in(folder)
        return spec


def _find_in(folder: str) -> None:
    finders = sys.path_importer_cache
    if not isinstance(finders.get(folder), _Finder) and os.path.isdir(folder):  # no zip file's
        finders[folder] = _Finder(folder)


def write_whole() -> None:
    """From now on, in this process."""
    for name, module in list(sys.modules.items()):
        if name == "gpuprobe" or name.startswith("gpuprobe."):
            for folder in getattr(module, "__path__", ()):
                _find_in(folder)
