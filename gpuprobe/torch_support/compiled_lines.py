"""Which lines and modules of the program a line of code that Inductor generated belongs to.

Inductor keeps the traced operators that a buffer was made from, and they keep the stack of the
program at the time (``stack_trace`` in the metadata of FX nodes) and the modules whose forward ran
(``nn_module_stack``).
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
_OWN: Final = re.compile(r"L\['\w+'\]")
_ARGUMENT: Final = re.compile(r"\b(buf\d+)\b")

_files: dict[str, dict[int, tuple[ProgramFrame, ...]]] = {}
_modules: dict[tuple[str, int], str] = {}


def lines_of(file: str, line: int) -> tuple[ProgramFrame, ...] | None:
    """The program's frames for a line of generated code, innermost first; empty where they are not
    known, None for code that was not generated.
    """
    found = _files.get(file)
    return None if found is None else found.get(line, ())


def module_of(file: str, line: int) -> str:
    """The module whose forward a line of generated code is part of: its path in the module that was
    compiled, after that one's class if it is known; "" where none is known, as in a backward pass.
    """
    return _modules.get((file, line), "")


def remember(graph: Any, file: str, source: str) -> None:
    """Find the frames of each line of a wrapper. ``graph`` is Inductor's ``GraphLowering``."""
    found: dict[int, tuple[ProgramFrame, ...]] = {}
    for number, text in enumerate(source.splitlines(), 1):
        node = _of(graph, text)
        if node is not None:
            found[number] = _parsed(node.meta["stack_trace"])
            if module := _module(node.meta.get("nn_module_stack")):
                _modules[file, number] = module
    _files[file] = found


def _module(stack: Any) -> str:
    """``stack``: from an id to the module's path in Dynamo's words, and its class; outermost first.

    Paths begin with what the compiled code calls the first module, as in ``L['self'].blocks.0``. It
    is not in the stack if the compiled code is its own forward; then its class is not known.
    """
    entries = list(stack.values()) if isinstance(stack, dict) else []
    if not entries:
        return ""
    (root, kind), (path, _) = entries[0], entries[-1]
    own = _OWN.match(root)
    if own and own.end() < len(root):
        return str(path[own.end() :].lstrip("."))
    title = getattr(kind, "__name__", str(kind).rpartition(".")[2])
    return f"{title}{path.removeprefix(root) if path.startswith(root) else ''}"


def _of(graph: Any, text: str) -> Any:
    """The operator of one line: of the buffer that it makes or fills."""
    match = _OUT.search(text) or _MADE.match(text)
    names = [match[1]] if match else []
    if ".run(" in text:
        names = _ARGUMENT.findall(text)[::-1]
    for name in names:
        buffer = graph.name_to_buffer.get(name) or graph.name_to_op.get(name)
        node = _origin(buffer)
        if node is not None:
            return node
    return None


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
