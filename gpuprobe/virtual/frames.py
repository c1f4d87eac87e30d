"""Which frame of the program is at work, past those of gpuprobe and torch."""

from __future__ import annotations

import sys
from typing import Any, Final

import torch

from gpuprobe.code_origin import PACKAGE
from gpuprobe.torch_support.callers import TORCH, place_of, program_line

# The code whose frames call the C++ autograd engine.
_ENGINE = frozenset({torch.autograd.graph._engine_run_backward.__code__})
PLUMBING: Final = (PACKAGE, f"{TORCH}_ops.py", f"{TORCH}utils/_python_dispatch.py")


def where() -> str:
    """The innermost line of the program, as ``file:line``."""
    return place_of(*program_line())


def caller() -> Any:
    """The innermost Python frame that is not gpuprobe's or torch's plumbing; None at the top."""
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(PLUMBING):
        frame = frame.f_back
    return frame


def in_engine() -> bool:
    """Whether C++ code of the backward pass is at work, and no Python code called by it."""
    if torch._C._current_autograd_node() is None:
        return False
    frame = caller()
    return frame is not None and frame.f_code in _ENGINE


def instruction() -> tuple[int, int]:
    """Which instruction of which Python frame is at work, gpuprobe's and torch's plumbing
    aside: a frame's id and an offset into its code.
    """
    frame = caller()
    return (id(frame), frame.f_lasti) if frame is not None else (0, 0)
