"""What goes wrong while a program is recorded: noted, reported once, and kept from the program.

A full disk costs what could not be written, no more; an internal error of gpuprobe ends the
recording. Exceptions of the program itself pass through.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from types import FrameType
from typing import Final

from gpuprobe.frame_variables import variables
from gpuprobe.model.run.session import ProgramError
from gpuprobe.user_frames import PACKAGE


def from_program(error: BaseException) -> bool:
    """Whether a signal handler or the debugger of the program raised this.

    Python runs a handler between any two instructions of the main thread, in our code too: what it
    raises (a time limit, for example) is intended for the program. A handler or a trace function is
    recognised by an argument: the frame that it interrupts, which is the one below its own.
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


def _holds(value: object, frame: FrameType) -> bool:
    return value is frame or (type(value) is tuple and any(item is frame for item in value))


_log = logging.getLogger("gpuprobe")


class Failures:
    """The failures of one recorder. ``texts`` is what the end of the recording lists. Inside (as a
    context manager), what cannot be written is lost, and reported the first time.
    """

    def __init__(self, warn: Callable[[str], None] = _log.warning) -> None:
        self.texts: list[str] = []
        self._warn = warn
        self._lost_writes = 0

    def fault(self, error: Exception, stop: Callable[[], None]) -> None:
        """Call ``stop`` for an internal error, and report it, unless the same one was reported
        before.
        """
        text = described(error)
        if text in self.texts:  # raised by the next step's record, which was already queued
            return
        self.texts.append(text)
        _log.debug("gpuprobe fault", exc_info=error)
        stop()
        self._report(f"gpuprobe stopped recording, the program continues: {text}")

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> bool:
        if not isinstance(error, OSError) or from_program(error):  # TimeoutError is one, too
            return False
        self._lost_writes += 1  # the recording itself has a `Gap`
        if self._lost_writes == 1:
            self._report(f"gpuprobe cannot write its recording, the program continues: {error}")
        return True

    def _report(self, text: str) -> None:
        """Warn. The warning may go through the program's own logging, which may fail, too."""
        try:
            self._warn(text)
        except Exception as error:
            if from_program(error):
                raise
            self.texts.append(f"a warning was lost: {described(error)}")


def described(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


_OUT_OF_MEMORY: Final = (
    "you tried to allocate",
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "Cuda failure 2 'out of memory'",  # NCCL
)


def program_error(error: BaseException) -> ProgramError:
    """The error that ended the program. torch's out-of-memory error is recognised by its name; a
    failed allocation on the CPU, of pinned memory (``CUDA error: out of memory``) or in a library
    by its text.
    """
    name = type(error).__name__
    text = re.sub(r"\x1b\[[0-9;]*m", "", str(error))  # torch.load prints in bold
    out_of_memory = name in ("OutOfMemoryError", "MemoryError") or any(
        words in text for words in _OUT_OF_MEMORY
    )
    return ProgramError(type=name, message=text[:2000], out_of_memory=out_of_memory)
