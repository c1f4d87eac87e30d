"""The origin of the code that a frame runs: gpuprobe itself, a library, or the program.

Folders end with a separator, so that ``torchvision`` is not mistaken for ``torch``.
"""

from __future__ import annotations

import linecache
import os
import sys
from pathlib import Path
from types import CodeType, ModuleType
from typing import Final

PACKAGE: Final = str(Path(__file__).parent) + os.sep
"""The prefix of the file names of gpuprobe's own code."""


INSTALLED: Final = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
"""Parts of the file names of installed packages."""

_STANDARD: Final = str(Path(os.__file__).parent) + os.sep


def is_standard_library(file: str) -> bool:
    """Whether a file belongs to Python's own library, and not to a package that is installed in
    it.
    """
    return file.startswith(_STANDARD) and not any(folder in file for folder in INSTALLED)


def folder_of(module: ModuleType) -> str:
    """The prefix of the file names of all code of a package."""
    return str(Path(str(module.__file__)).parent) + os.sep


def line_of(code: CodeType, instruction: int) -> int:
    """The source line of an instruction (an offset, as ``f_lasti``)."""
    for start, end, line in code.co_lines():
        if start <= instruction < end:
            return line or code.co_firstlineno
    return code.co_firstlineno


def name_of(file: str) -> str:
    """The name of a file in messages: ``In [3]`` for the code of a notebook's cell, which IPython
    compiles under another name (a temporary file's, or ``<ipython-input-…>``); otherwise ``file``.

    The cell's text is added to `linecache` under its new name, as it is under the old one, so that
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
