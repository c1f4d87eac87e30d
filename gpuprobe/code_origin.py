"""Whose code a frame runs: gpuprobe's own, a library's, or the program's.

Folders end with a separator, so that ``torchvision`` is not taken for ``torch``.
"""

from __future__ import annotations

import os
from pathlib import Path
from types import CodeType, ModuleType
from typing import Final

PACKAGE: Final = str(Path(__file__).parent) + os.sep
"""What the file names of gpuprobe's own code begin with."""


def folder_of(module: ModuleType) -> str:
    """What the file names of all code of a package begin with."""
    return str(Path(str(module.__file__)).parent) + os.sep


def line_of(code: CodeType, instruction: int) -> int:
    """The source line of an instruction (an offset, as ``f_lasti``)."""
    for start, end, line in code.co_lines():
        if start <= instruction < end:
            return line or code.co_firstlineno
    return code.co_firstlineno
