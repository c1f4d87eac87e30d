"""Which lines of the program a line of code that Inductor generated belongs to.

Inductor keeps the traced operators that a buffer was made from, and they keep the stack of the
program at the time (``stack_trace`` in the metadata of FX nodes).
"""

from __future__ import annotations

import re
from typing import Any, Final, NamedTuple


class ProgramFrame(NamedTuple):
    """One frame of the program."""

    file: str
    line: int
    function: str


_FRAME: Final = re.compile(r'File "([^"]+)", line (\d+), in (.+)')
_MADE: Final = re.compile(r"^\s*(\w+) = (?!async_compile)")
_OUT: Final = re.compile(r"\bout=(?:reinterpret_tensor\()?(\w+)")
_ARGUMENT: Final = re.compile(r"\b(buf\d+)\b")

_files: dict[str, dict[int, tuple[ProgramFrame, ...]]] = {}


def lines_of(file: str, line: int) -> tuple[ProgramFrame, ...] | None:
    """The program's frames for a line of generated code, innermost first; empty where they are not
    known, None for code that was not generated.
    """
    found = _files.get(file)
    return None if found is None else found.get(line, ())


def remember(graph: Any, file: str, source: str) -> None:
    """Find the frames of each line of a wrapper. ``graph`` is Inductor's ``GraphLowering``."""
    found: dict[int, tuple[ProgramFrame, ...]] = {}
    for number, text in enumerate(source.splitlines(), 1):
        frames = _of(graph, text)
        if frames:
            found[number] = frames
    _files[file] = found


def _of(graph: Any, text: str) -> tuple[ProgramFrame, ...]:
    """The frames of one line: of the buffer that it makes or fills."""
    match = _OUT.search(text) or _MADE.match(text)
    names = [match[1]] if match else []
    if ".run(" in text:
        names = _ARGUMENT.findall(text)[::-1]
    for name in names:
        buffer = graph.name_to_buffer.get(name) or graph.name_to_op.get(name)
        node = _origin(buffer)
        if node is not None:
            return _parsed(node.meta["stack_trace"])
    return ()


def _origin(buffer: Any) -> Any:
    """The operator that a buffer is the result of; of several that were fused, the last."""
    if buffer is None:
        return None
    node = getattr(buffer, "origin_node", None)
    if node is not None and node.meta.get("stack_trace"):
        return node
    known = [item for item in getattr(buffer, "origins", ()) if item.meta.get("stack_trace")]
    return max(known, default=None)


def _parsed(trace: str) -> tuple[ProgramFrame, ...]:
    frames = [
        ProgramFrame(match[1], int(match[2]), match[3].strip()) for match in _FRAME.finditer(trace)
    ]
    return tuple(reversed(frames))
