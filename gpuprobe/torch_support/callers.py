"""Who calls: the program's line, and the module that is at work."""

from __future__ import annotations

import sys
from typing import Any, Final

import torch

from gpuprobe.code_origin import INSTALLED, PACKAGE, folder_of, name_of
from gpuprobe.frame_variables import variables

TORCH: Final = folder_of(torch)
"""What the file names of torch's own code begin with."""


def place_of(file: str, line: int) -> str:
    """``file:line`` for a reader: of installed packages only what comes after the folder that
    they all lie in.
    """
    for folder in INSTALLED:
        if folder in file:
            return f"{file.rpartition(folder)[2]}:{line}"
    return f"{name_of(file)}:{line}"


def installed(file: str) -> bool:
    """Whether a file is an installed package's."""
    return file.startswith(TORCH) or any(folder in file for folder in INSTALLED)


def program_line() -> tuple[str, int]:
    """File and line of the innermost frame that is neither gpuprobe's nor torch's; the outermost
    frame if all are.
    """
    frame: Any = sys._getframe(1)
    last = ("<unknown>", 0)
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith((PACKAGE, TORCH, "<frozen")):
            return name, frame.f_lineno or 0
        last = (name, frame.f_lineno or 0)
        frame = frame.f_back
    return last


_OF_OPERATORS: Final = (f"{TORCH}_ops.py", PACKAGE)


def passed_on(error: BaseException) -> BaseException:
    """What an operator raised that Python code called in the program's place, to be raised again
    by that code, which lets go of its arguments: frames that the program does not have must not
    keep its tensors alive while it handles the exception.
    """
    entry = error.__traceback__
    if entry is not None:  # the caller's own frame
        entry = entry.tb_next
    while entry is not None and entry.tb_frame.f_code.co_filename.startswith(_OF_OPERATORS):
        entry = entry.tb_next
    return error.with_traceback(entry)


_OF_MODULES: Final = f"{TORCH}nn/modules/module.py"
_OF_SHARDS: Final = "_fsdp_param_group.py"


def module_at_work() -> str:
    """The module that a collective is made for: by FSDP2's own account, or the class of the one
    whose forward is at work. "" where there is none, as in a hook of the backward pass.
    """
    frame: Any = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_filename.endswith(_OF_SHARDS):
            this: Any = variables(frame).get("self")
            if type(this).__name__ == "FSDPParamGroup":
                return str(this._module_fqn or "")
        elif code.co_name == "_call_impl" and code.co_filename == _OF_MODULES:
            return type(variables(frame)["self"]).__name__
        frame = frame.f_back
    return ""
