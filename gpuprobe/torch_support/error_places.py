"""Where in the program an exception was raised."""

from __future__ import annotations

from collections.abc import Iterator
from types import TracebackType

import torch

from gpuprobe.code_origin import PACKAGE, is_standard_library
from gpuprobe.torch_support.callers import TORCH, place_of


def frames_of(error: BaseException) -> Iterator[TracebackType]:
    """The frames that an exception came through, outermost first."""
    traceback = error.__traceback__
    while traceback is not None:
        yield traceback
        traceback = traceback.tb_next


def place_in(error: BaseException) -> str:
    """The innermost line of the program that an exception came through. Where there is none, of
    the exception that was being handled: a signal's handler raises wherever the process is, even
    when the program has failed already. Of Python's own library only where there is neither.
    """
    standard = ""
    followed: list[BaseException] = []
    while error not in followed:
        followed.append(error)
        place, inner = _places_in(error)
        if place:
            return place
        standard = standard or inner
        error = error.__cause__ or error.__context__ or error
    return standard or "<unknown>"


def _places_in(error: BaseException) -> tuple[str, str]:
    """The innermost line of the program, and that of Python's own library; "" for none."""
    place = standard = ""
    for traceback in frames_of(error):
        file = traceback.tb_frame.f_code.co_filename
        if is_standard_library(file):
            standard = place_of(file, traceback.tb_lineno)
        elif not file.startswith((PACKAGE, TORCH, "<frozen")):
            place = place_of(file, traceback.tb_lineno)
    return place, standard


def of_host_memory(error: BaseException) -> bool:
    """Whether the host had no more memory for a tensor: ``alloc_cpu.cpp`` in ``c10/core``."""
    return (
        isinstance(error, (RuntimeError, MemoryError))
        and not isinstance(error, torch.OutOfMemoryError)
        and (isinstance(error, MemoryError) or "you tried to allocate" in str(error))
    )
