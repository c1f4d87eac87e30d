"""Whose code a frame runs: gpuprobe's own, a library's, or the program's.

Folders end with a separator, so that ``torchvision`` is not taken for ``torch``.
"""

from __future__ import annotations

import linecache
import os
import sys
from pathlib import Path
from types import CodeType, ModuleType
from typing import Final

PACKAGE: Final = str(Path(__file__).parent) + os.sep
"""What the file names of gpuprobe's own code begin with."""


INSTALLED: Final = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
"""What is in the file names of installed packages."""

_STANDARD: Final = str(Path(os.__file__).parent) + os.sep


def is_standard_library(file: str) -> bool:
    """Whether a file is of Python's own library, and of no package that is installed in it."""
    return file.startswith(_STANDARD) and not any(folder in file for folder in INSTALLED)


def folder_of(module: ModuleType) -> str:
    """What the file names of all code of a package begin with."""
    return str(Path(str(module.__file__)).parent) + os.sep


def line_of(code: CodeType, instruction: int) -> int:
    """The source line of an instruction (an offset, as ``f_lasti``)."""
    for start, end, line in code.co_lines():
        if start <= instruction < end:
            return line or code.co_firstlineno
    return code.co_firstlineno


def name_of(file: str) -> str:
    """How a file is named to people: ``In [3]`` for the code of a notebook's cell, which IPython
    compiles under a name of its own (a temporary file's, or ``<ipython-input-…>``); else ``file``.

    The cell's text is given to `linecache` under its new name, as it is under the old one, so that
    its lines can be shown.
    """
    if "ipython" not in file and "ipykernel" not in file:
        return file
    return _cell_name(file)


def _cell_name(file: str) -> str:
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    if shell is None:
        return file
    # A pair such as ("Cell", "In[3]"); None for other files (IPython's CachingCompiler).
    found = shell.compile.format_code_name(file)
    if found is None or not found[1].startswith("In["):
        return file
    name = f"In {found[1][2:]}"
    lines = linecache.getlines(file)
    linecache.cache[name] = (sum(map(len, lines)), None, lines, name)
    return name
