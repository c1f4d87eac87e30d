"""Which lines and modules of the program a line of code that Inductor generated belongs to.

Inductor keeps the traced operators that a buffer was made from, and they keep the stack of the
program at the time (``stack_trace`` in the metadata of FX nodes) and the modules whose forward ran
(``nn_module_stack``).
"""

from __future__ import annotations

import re
from itertools import chain
from typing import Any, Final, NamedTuple

from gpuprobe.model.trace import phase_tag
from gpuprobe.torch_support import compiled_modules
from gpuprobe.torch_support.compiled_modules import ModulePath


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
_modules: dict[tuple[str, int], tuple[ModulePath, str]] = {}
_backward: set[str] = set()  # files of backward graphs
FORWARD_STACK: Final = "fwd_nn_module_stack"
"""What AOTAutograd calls the modules of the forward node in the metadata of a backward node."""


def any_known() -> bool:
    """Whether any code was generated whose lines are known."""
    return bool(_files)


def lines_of(file: str, line: int) -> tuple[ProgramFrame, ...] | None:
    """The program's frames for a line of generated code, innermost first; empty where they are not
    known, None for code that was not generated.
    """
    found = _files.get(file)
    return None if found is None else found.get(line, ())


def module_of(file: str, line: int) -> str:
    """The name of the module that a line of generated code is part of, while it runs; "" where none
    is known. In a backward pass, the module of the operator whose gradient it computes.
    """
    found = _modules.get((file, line))
    if found is None:
        return ""
    module, traced = found
    return compiled_modules.running_name(module, file, backward=file in _backward, traced=traced)


def in_program_lines(snapshot: dict[str, Any]) -> None:
    """Put the program's lines and modules in the place of those of generated code, in what
    ``torch.cuda.memory._snapshot`` returned in the process that compiled it.
    """
    if not _files:
        return
    known: dict[int, tuple[list[dict[str, Any]], str]] = {}
    blocks = [block for segment in snapshot["segments"] for block in segment["blocks"]]
    for entry in chain(*snapshot["device_traces"], blocks):
        frames = entry.get("frames")
        if not frames:
            continue
        key = id(frames)  # many entries share one list, which they keep alive
        if key not in known:
            known[key] = _translated(frames)
        translated, module = known[key]
        if translated is not frames:
            known[id(translated)] = translated, module
            entry["frames"] = translated
        if module and "action" in entry:
            entry["user_metadata"] = phase_tag(entry.get("user_metadata", ""), module)


def _translated(frames: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], str]:
    """``frames`` itself if none is of generated code."""
    if not any(frame["filename"] in _files for frame in frames):
        return frames, ""
    found: list[dict[str, Any]] = []
    module = ""
    for frame in frames:
        file, line = frame["filename"], frame["line"]
        if file not in _files:
            found.append(frame)
            continue
        # Where the operator of a line is not known, the line itself is all there is.
        origins = _files[file].get(line)
        found += (
            [frame]
            if origins is None
            else [
                {"filename": item.file, "line": item.line, "name": item.function}
                for item in origins
            ]
        )
        if not module and (file, line) in _modules:
            module = compiled_modules.shared_name(*_modules[file, line])
    return found, module


def remember(graph: Any, file: str, source: str) -> None:
    """Find the frames of each line of a wrapper. ``graph`` is Inductor's ``GraphLowering``."""
    found: dict[int, tuple[ProgramFrame, ...]] = {}
    modules: dict[int, ModulePath] = {}
    for number, text in enumerate(source.splitlines(), 1):
        node = _of(graph, text)
        if node is not None:
            found[number] = _parsed(node.meta.get("stack_trace") or "")
            modules[number] = compiled_modules.of_stack(_module_stack(node))
    names = compiled_modules.traced_names(set(modules.values()))
    for number, module in modules.items():
        _modules[file, number] = module, names[module]
    _files[file] = found
    if graph.is_backward:
        _backward.add(file)


def _module_stack(node: Any) -> Any:
    """The modules in which a node was traced, outermost first; None where that is not known.

    A sum of gradients is no operator's gradient, and has no forward node: it belongs to the modules
    of the last of its terms, with which it is complete.
    """
    while True:
        stack = node.meta.get("nn_module_stack") or node.meta.get(FORWARD_STACK)
        summed = node.meta.get("partitioner_tag") == "is_backward"
        if stack or FORWARD_STACK in node.meta or not summed or not node.all_input_nodes:
            return stack
        node = max(node.all_input_nodes)


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
    """The operator that a buffer is the result of; of several that were fused, the last. One that
    only torch's own modules have called has a module and no line.
    """
    if buffer is None:
        return None
    node = getattr(buffer, "origin_node", None)
    origins = getattr(buffer, "origins", ())
    for keys in (("stack_trace",), ("nn_module_stack", FORWARD_STACK)):
        if node is not None and any(node.meta.get(key) for key in keys):
            return node
        known = [item for item in origins if any(item.meta.get(key) for key in keys)]
        if known:
            return max(known)
    return None


def _parsed(trace: str) -> tuple[ProgramFrame, ...]:
    frames = [
        ProgramFrame(match[1], int(match[2]), match[3].strip()) for match in _FRAME.finditer(trace)
    ]
    return tuple(reversed(frames))
