"""Telling the program's own exceptions from ours, where they come up in the midst of our code."""

from __future__ import annotations

from types import FrameType
from typing import Any

from gpuprobe.code_origin import PACKAGE
from gpuprobe.frame_variables import variables


def from_program(error: BaseException) -> bool:
    """Whether a signal handler of the program's raised this, or its debugger did.

    Python runs a handler between any two instructions of the main thread, ours too: what it raises
    (a time limit, say) is meant for the program. A handler, and a trace function, is told apart by
    what it is called with: the frame that it interrupts, which is the one below its own.
    """
    interrupted: FrameType | None = None
    entry = error.__traceback__
    while entry is not None:
        frame = entry.tb_frame
        if (
            interrupted is not None
            and not frame.f_code.co_filename.startswith(PACKAGE)
            and any(_holds(value, interrupted) for value in variables(frame).values())
        ):
            return True
        interrupted = frame
        entry = entry.tb_next
    return False


def _holds(value: Any, frame: FrameType) -> bool:
    return value is frame or (type(value) is tuple and any(item is frame for item in value))
