"""Which line of the program an operation is laid to."""

from __future__ import annotations

import contextlib
import copy
import multiprocessing
import sys
import warnings
from typing import Any, Final

import torch
import typing_extensions

from gpuprobe.code_origin import PACKAGE, folder_of, line_of, name_of
from gpuprobe.model.place import Place
from gpuprobe.torch_support.compiled_lines import lines_of

_SKIP: Final = (
    folder_of(torch),
    PACKAGE,
    "<frozen",
    "<string>",
    copy.__file__,
    contextlib.__file__,
    folder_of(multiprocessing),
    # Wrappers around functions of torch's that are deprecated.
    typing_extensions.__file__,
    warnings.__file__,
)

_skipped: dict[str, bool] = {}  # by file name: whether it is torch's, Python's or ours


def is_users(file: str) -> bool:
    """Whether a file is the program's, and none of torch's, Python's or ours."""
    skipped = _skipped.get(file)
    if skipped is None:
        skipped = _skipped[file] = file.startswith(_SKIP)
    return not skipped


backward_sites: Final[list[Any]] = []
"""Where the program has called the backward passes that are under way. On CUDA the autograd engine
has threads of its own, without any frame of the program.
"""


def site_at_hand() -> Any:
    """The innermost frame of the program: its code and instruction, resolved by `place`. In a thread
    without one, the place that called the backward pass.
    """
    frame: Any = sys._getframe(2)
    while frame is not None:
        code = frame.f_code
        skipped = _skipped.get(code.co_filename)
        if skipped is None:
            skipped = _skipped[code.co_filename] = code.co_filename.startswith(_SKIP)
        if not skipped:
            return code, frame.f_lasti
        frame = frame.f_back
    return backward_sites[-1] if backward_sites else None


def place(site: Any) -> Place | None:
    """The file and line that a site stands for."""
    if site is None:
        return None
    code, instruction = site
    line = line_of(code, instruction)
    if origins := lines_of(code.co_filename, line):  # of code that torch's compiler wrote
        return Place(*origins[0])
    name = getattr(code, "co_qualname", code.co_name)
    return Place(name_of(code.co_filename), line, name)
