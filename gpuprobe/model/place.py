"""A place in source code, or the reason why it is unknown."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

from gpuprobe.model.values import LineNumber


@dataclass(frozen=True, slots=True)
class Place:
    """A line of code. ``line`` counts from 1; ``function`` may be empty.

    Of native code only the function is known: then ``file`` is empty and ``line`` 0.
    """

    file: str
    line: LineNumber
    function: str = ""

    def __str__(self) -> str:
        """``file:line in function``, as every report shows it."""
        if not self.file:
            return self.function
        return f"{self.file}:{self.line}" + (f" in {self.function}" if self.function else "")


_RESUMED = re.compile(r"torch_dynamo_resume_in_(.+)_at_\d+")


def program_name(function: str) -> str:
    """A function's name in the program: after a graph break torch.compile continues in a function
    that it generates (``torch/_dynamo/resume_execution.py``), with the lines of the program's.
    """
    found = _RESUMED.fullmatch(function)
    return found[1] if found else function


class NoPlace(str, Enum):
    """Why memory has no line, or no module, of the user's. Its text is the row's name."""

    UNKNOWN = "(unknown)"  # without any stack or module
    BEFORE_THE_TRACE = "(before the trace)"  # without a stack, and alive before recording began
    AUTOGRAD_ENGINE = "(autograd engine)"  # from a backward thread, which has no Python frames
    NO_MODULE = "(no module)"  # it is known where it was made, and no module is recorded with it
    NO_USER_FRAME = "(no user frame)"  # its stack has frames, none of them the user's

    def __str__(self) -> str:
        return self.value


SourceLine: TypeAlias = Place | NoPlace
"""Where memory was allocated: the user's line of code, or why there is none."""

_PLACE = re.compile(r"(?P<file>.+?):(?P<line>[0-9]+)(?: in (?P<function>.*))?", re.DOTALL)
_REASONS = {reason.value: reason for reason in NoPlace}


def parse_place(text: str) -> Place | NoPlace:
    """Parse the ``str`` of a place, the form in which files hold it."""
    if text in _REASONS:
        return _REASONS[text]
    found = _PLACE.fullmatch(text)
    if found is None:
        return Place("", 0, text)
    return Place(found["file"], int(found["line"]), found["function"] or "")
