"""Lines and modules of the program: where a call comes from, and where an exception was raised."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from types import FrameType, TracebackType
from typing import Any, Final

import torch

from gpuprobe.frame_variables import variables
from gpuprobe.model.place import NoPlace, Place, SourceLine
from gpuprobe.torch_support.compiled_code import TORCH, lines_of
from gpuprobe.user_frames import (
    GENERATED,
    PACKAGE,
    USERS,
    Owner,
    file_and_line,
    innermost,
    owner_of,
)


def line_now(frame: FrameType) -> tuple[str, int]:
    """File and line that a frame is at; for code that torch.compile wrote, the program's line."""
    file, line = frame.f_code.co_filename, frame.f_lineno or 0
    origins = lines_of(file, line)
    return origins[0][:2] if origins else (file, line)


def program_line() -> tuple[str, int] | None:
    """File and line of the innermost frame of the program and its libraries, else of code without a
    file (``python -c``); None in a thread of the backward pass, which has none.
    """
    caller = sys._getframe(1)
    frame = innermost(caller) or innermost(caller, GENERATED)
    return None if frame is None else line_now(frame)


def user_line() -> SourceLine:
    """The innermost line that the user wrote; without one, `program_line`."""
    frame = innermost(sys._getframe(1), USERS)
    line = program_line() if frame is None else line_now(frame)
    return NoPlace.AUTOGRAD_ENGINE if line is None else Place(*line)


def place_now() -> str:
    """`program_line` as text."""
    line = program_line()
    return "the backward pass" if line is None else file_and_line(*line)


_OF_OPERATORS: Final = (f"{TORCH}_ops.py", PACKAGE)


def passed_on(error: BaseException) -> BaseException:
    """The exception of an operator that Python code called on behalf of the program, for that code
    to raise again after it has released its arguments: frames that the program does not have must
    not keep its tensors alive while it handles the exception.
    """
    entry = error.__traceback__
    if entry is not None:  # the caller's own frame
        entry = entry.tb_next
    while entry is not None and entry.tb_frame.f_code.co_filename.startswith(_OF_OPERATORS):
        entry = entry.tb_next
    return error.with_traceback(entry)


_OF_MODULES: Final = f"{TORCH}nn/modules/module.py"
_OF_SHARDS: Final = "_fsdp_param_group.py"


def running_module() -> str:
    """The module that a collective belongs to: as recorded by FSDP2, or the class of the module
    whose forward runs. "" without one, as in a hook of the backward pass.
    """
    frame: FrameType | None = sys._getframe(1)
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


def frames_of(error: BaseException) -> Iterator[TracebackType]:
    """The frames that an exception passed through, outermost first."""
    traceback = error.__traceback__
    while traceback is not None:
        yield traceback
        traceback = traceback.tb_next


def place_in(error: BaseException) -> str:
    """The innermost line of the program that an exception passed through. Without one, that of the
    exception that was being handled: a signal handler raises wherever the process is, even after
    the program has failed. A line of code without a file (``<string>``: what `exec` runs, and the
    methods of a dataclass or a named tuple) or of Python's own library only if there is neither.
    """
    other = ""
    visited: list[BaseException] = []
    while error not in visited:
        visited.append(error)
        place, generated, standard = _places_in(error)
        if place:
            return place
        other = other or generated or standard
        error = error.__cause__ or error.__context__ or error
    return other or "<unknown>"


def _places_in(error: BaseException) -> tuple[str, str, str]:
    """The innermost line of the program's files, of code without a file, and of Python's own
    library; "" for none.
    """
    place = generated = standard = ""
    for traceback in frames_of(error):
        file = traceback.tb_frame.f_code.co_filename
        owner, shown = owner_of(file), file_and_line(file, traceback.tb_lineno)
        if owner is Owner.PYTHON:
            standard = shown
        elif owner is Owner.GENERATED:
            generated = shown
        elif owner in (Owner.USER, Owner.LIBRARY):
            place = shown
    return place, generated, standard


_AT_ONCE = re.compile(r"Tried to allocate ([\d.]+) (\w+)")
_UNITS = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}  # of torch's `format_size`


def beyond_any_gpu(error: BaseException) -> int:
    """The bytes that a GPU without a limit could not allocate, as torch rounds them; 0 for another
    error, as for a limit that the program has set (``set_per_process_memory_fraction``).
    """
    text = str(error)
    if not isinstance(error, torch.OutOfMemoryError) or " allowed" in text:
        return 0
    found = _AT_ONCE.search(text)
    return int(float(found[1]) * _UNITS[found[2]]) if found else 0


def of_host_memory(error: BaseException) -> bool:
    """Whether the host had no more memory for a tensor: ``alloc_cpu.cpp`` in ``c10/core``."""
    return (
        isinstance(error, (RuntimeError, MemoryError))
        and not isinstance(error, torch.OutOfMemoryError)
        and (isinstance(error, MemoryError) or "you tried to allocate" in str(error))
    )
