"""Which line and module of the program a line of code that Inductor generated belongs to.

Inductor keeps the traced operators that a buffer was made from, and they keep the stack of the
program at the time (``stack_trace`` in the metadata of FX nodes) and the modules in whose forward
they were traced (``nn_module_stack``), by their paths from what the compiled function calls them:
``L['self'].blocks.0``. AOTAutograd gives backward nodes those of their forward nodes
(``copy_fwd_metadata_to_bw_nodes`` in ``torch/_functorch/_aot_autograd/utils.py``).

Such a path does not always begin at the model: after a graph break, or if a part was compiled, the
code is that of an inner module, and several modules of one class share it. So the name is completed
by the module that was called; in a backward pass, by that of its forward pass. A history of
allocations is read later: until then, the calls of compiled code are kept with their times.
"""

from __future__ import annotations

import re
import sys
import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterable
from itertools import chain
from operator import itemgetter
from types import FrameType
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch.utils.weak import WeakIdKeyDictionary

from gpuprobe.clocks import time_ns
from gpuprobe.frame_variables import variables
from gpuprobe.model.trace import phase_tag
from gpuprobe.user_frames import Owner, folder_of, owner_of

if TYPE_CHECKING:
    from torch._inductor.graph import GraphLowering
    from torch.fx import Node
    from torch.nn import Module

TORCH: Final = folder_of(torch)
_MODULES: Final = f"{TORCH}nn/modules/module.py"
_RUNTIME: Final = f"{TORCH}_functorch/_aot_autograd/runtime_wrappers.py"
_GENERATED: Final = ":codegen("
"""In the file names of functions that AOTAutograd generates (``subclass_codegen.py``)."""
_BETWEEN: Final = frozenset((Owner.TORCH, Owner.GPUPROBE))
_RESUMED: Final = "torch_dynamo_resume_in_forward"
_OWN: Final = re.compile(r"L\['self'\]")
MOST_PASSES: Final = 100_000
"""Forward passes that are remembered until their backward pass."""

Named = Iterable[tuple[str, "Module"]]


class ModulePath(NamedTuple):
    """A module as Dynamo describes it. ``own``: ``path`` begins at the module whose code it is (""
    for that module itself); ``text`` is the path with any known class, ``kind`` the module's class,
    ``key`` its id when the code was traced, 0 if unknown.
    """

    own: bool
    path: str
    text: str
    kind: str
    key: int


OWN: Final = ModulePath(True, "", "", "", 0)
"""The module whose forward was compiled."""

_names: Any = WeakIdKeyDictionary()  # ``==`` of tensordict's modules compares their tensors
_ids: dict[int, weakref.ref[Module]] = {}
_searches: list[Callable[[], Named]] = []
_forwards: dict[int, weakref.ref[Module]] = {}  # by the number of the autograd node


def name_modules(named: Named) -> None:
    """Register the names of these modules."""
    for name, found in named:
        module = unwrapped(found)
        _names[module] = name
        _ids[id(module)] = weakref.ref(module)


def search_with(search: Callable[[], Named]) -> Callable[[], None]:
    """Search for names of modules with this function. Returns a function that ends this."""
    _searches.append(search)
    return lambda: _searches.remove(search) if search in _searches else None


def unwrapped(module: Module) -> Module:
    """The module that ``torch.compile`` was called with, if ``module`` is its result."""
    while type(module).__name__ == "OptimizedModule" and "_orig_mod" in module._modules:
        module = module._modules["_orig_mod"]
    return module


def of_stack(stack: object) -> ModulePath:
    """The innermost module of a stack: from an id to the module's path, and its class; outermost
    first. The first is missing if the compiled code is its own forward.
    """
    entries = list(stack.items()) if isinstance(stack, dict) else []
    if not entries:
        return OWN
    (_, (root, kind)), (key, (path, inner)) = entries[0], entries[-1]
    own = _OWN.match(root)
    if own and own.end() < len(root):
        text = str(path[own.end() :].lstrip("."))
    else:
        text = f"{_title(kind)}{path.removeprefix(root) if path.startswith(root) else ''}"
    identity = str(key).partition("@")[0]
    return ModulePath(
        own=_OWN.match(path) is not None,
        path=_OWN.sub("", path, count=1).lstrip("."),
        text=text,
        kind=_title(inner),
        key=int(identity) if identity.isdecimal() else 0,
    )


def _title(kind: object) -> str:
    return str(getattr(kind, "__name__", str(kind).rpartition(".")[2]))


def traced_names(found: Iterable[ModulePath]) -> dict[ModulePath, str]:
    """The names of the modules with which code was traced; for an unknown one its
    `ModulePath.text`.
    """
    names = {module: _by_id(module) for module in found}
    if any(not name and module.key for module, name in names.items()) and _search():
        names = {module: _by_id(module) for module in names}
    return {module: name or module.text for module, name in names.items()}


def _by_id(found: ModulePath) -> str:
    module = _ids[found.key]() if found.key in _ids else None
    return "" if module is None or _title(type(module)) != found.kind else _names[module]


def shared_name(found: ModulePath, traced: str) -> str:
    """The module's name, for compiled code if the module that it ran for is unknown. Modules of one
    class share their code: then the name begins with that class.
    """
    if not found.own or not found.path or not traced.endswith(f".{found.path}"):
        return traced
    name = traced.removesuffix(f".{found.path}")
    root = next((module for module, other in _names.items() if other == name), None)
    kinds = [type(module) for module in _names]
    if root is None or kinds.count(type(root)) < 2:
        return traced
    return f"{_title(type(root))}.{found.path}"


def running_name(found: ModulePath, file: str, *, backward: bool, traced: str) -> str:
    """The module's name, for compiled code in this file that is running now. ``traced`` is its name
    by `traced_names`, if no call of a module is known.
    """
    return _name_below(_of_forward() if backward else _called(file), found) or traced


def _name_below(root: Module | None, path: ModulePath) -> str:
    """The module's name, for code of this root; "" if it has no such module."""
    if root is None or not path.own:
        return ""
    module: Module | None = root
    for part in filter(None, path.path.split(".")):
        module = unwrapped(module)._modules.get(part) if module is not None else None
    if module is None or (path.kind and type(unwrapped(module)).__name__ != path.kind):
        return ""
    return _name_of(module)


def _name_of(module: Module) -> str:
    module = unwrapped(module)
    if module not in _names:
        _search()
    return _names.setdefault(module, type(module).__name__)


def _search() -> bool:
    for search in _searches:
        name_modules(search())
    return bool(_searches)


def _called(generated: str) -> Module | None:
    """The module whose ``forward`` runs, if that was compiled."""
    frame: FrameType | None = sys._getframe(2)
    differentiated = False
    while frame is not None:
        code = frame.f_code
        file, name = code.co_filename, code.co_name
        if file == _MODULES and name == "_call_impl":
            module = variables(frame)["self"]
            if differentiated:
                _remember(module)
            return module
        if file == _RUNTIME and name == "forward":
            differentiated = True
        elif not (
            owner_of(file) in _BETWEEN
            or file == generated
            or _GENERATED in file
            or name == "forward"
            or _RESUMED in name
        ):
            return None
        frame = frame.f_back
    return None


def _remember(module: Module) -> None:
    """Remember the module of the current autograd function: its node has the last number that was
    assigned.
    """
    if len(_forwards) >= MOST_PASSES:
        _forwards.clear()
    _forwards[torch._C._autograd._get_sequence_nr() - 1] = weakref.ref(module)


def _of_forward() -> Module | None:
    """The module whose forward pass the current backward pass belongs to."""
    node: Any = torch._C._current_autograd_node()
    found = None if node is None else _forwards.get(node._sequence_nr())
    return None if found is None else found()


class ProgramFrame(NamedTuple):
    """A frame of the program."""

    file: str
    line: int
    function: str


_FRAME: Final = re.compile(r'File "([^"]+)", line (\d+), in (.+)')
_MADE: Final = re.compile(r"^\s*(\w+) = (?!async_compile)")
_OUT: Final = re.compile(r"\bout=(?:reinterpret_tensor\()?(\w+)")
_ARGUMENT: Final = re.compile(r"\b(buf\d+)\b")

_files: dict[str, dict[int, tuple[ProgramFrame, ...]]] = {}
_Line = tuple[str, int]
"""A file and a line."""
_module_at: dict[_Line, tuple[ModulePath, str]] = {}
_backward: set[str] = set()  # files of backward graphs
FORWARD_STACK: Final = "fwd_nn_module_stack"
"""AOTAutograd's key for the modules of the forward node in the metadata of a backward node."""


_Calls = list[tuple[int, "weakref.ref[Module] | None"]]
"""Calls of compiled code: the time (microseconds since the Unix epoch, as in a history), and the
module that it ran for, None if unknown.
"""
_forward_calls: _Calls = []
_backward_calls: _Calls = []


def note_call(*, backward: bool) -> None:
    """Compiled code is called."""
    calls = _backward_calls if backward else _forward_calls
    module = _of_forward() if backward else _called("")
    if len(calls) >= MOST_PASSES:
        calls.clear()
    calls.append((time_ns() // 1000, None if module is None else weakref.ref(module)))


def forget_calls() -> None:
    """Forget the calls so far: a history that contains them ends."""
    _forward_calls.clear()
    _backward_calls.clear()


def _module_at_time(calls: _Calls, time_us: int) -> Module | None:
    """The module of the last call that began before this time."""
    number = bisect_right(calls, time_us, key=itemgetter(0)) - 1
    module = calls[number][1] if number >= 0 else None
    return None if module is None else module()


def any_known() -> bool:
    """Whether any code was generated whose lines are known."""
    return bool(_files)


def lines_of(file: str, line: int) -> tuple[ProgramFrame, ...] | None:
    """The program's frames for a line of generated code, innermost first; empty if they are
    unknown, None for code that was not generated.
    """
    found = _files.get(file)
    return None if found is None else found.get(line, ())


def module_of(file: str, line: int) -> str:
    """The name of the module that a line of generated code belongs to, while it runs; "" if
    unknown. In a backward pass, the module of the operator whose gradient it computes.
    """
    found = _module_at.get((file, line))
    if found is None:
        return ""
    module, traced = found
    return running_name(module, file, backward=file in _backward, traced=traced)


def in_program_lines(snapshot: dict[str, Any]) -> None:
    """Replace the lines of generated code by the program's lines and modules, in the result of
    ``torch.cuda.memory._snapshot`` of the process that compiled it.
    """
    if not _files:
        return
    known: dict[int, tuple[list[dict[str, Any]], _Line | None]] = {}
    blocks = [block for segment in snapshot["segments"] for block in segment["blocks"]]
    for entry in chain(*snapshot["device_traces"], blocks):
        frames = entry.get("frames")
        if not frames:
            continue
        key = id(frames)  # many entries share one list, which they keep alive
        if key not in known:
            known[key] = _translated(frames)
        translated, line = known[key]
        if translated is not frames:
            known[id(translated)] = translated, line
            entry["frames"] = translated
        if line is None or "action" not in entry:
            continue
        module = _module_then(line, entry.get("time_us", 0))
        if module:
            entry["user_metadata"] = phase_tag(entry.get("user_metadata", ""), module)


def _module_then(line: _Line, time_us: int) -> str:
    """The module that a line of generated code belonged to at this time; "" if unknown."""
    path, traced = _module_at[line]
    calls = _backward_calls if line[0] in _backward else _forward_calls
    return _name_below(_module_at_time(calls, time_us), path) or shared_name(path, traced)


def _translated(frames: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], _Line | None]:
    """The frames with those of generated code replaced, and the innermost of these lines that
    belongs to a module; ``frames`` itself if there are none.
    """
    if not any(frame["filename"] in _files for frame in frames):
        return frames, None
    found: list[dict[str, Any]] = []
    known: _Line | None = None
    for frame in frames:
        file, line = frame["filename"], frame["line"]
        if file not in _files:
            found.append(frame)
            continue
        # If the operator of a line is unknown, the line itself is kept.
        origins = _files[file].get(line)
        found += (
            [frame]
            if origins is None
            else [
                {"filename": item.file, "line": item.line, "name": item.function}
                for item in origins
            ]
        )
        if known is None and (file, line) in _module_at:
            known = file, line
    return found, known


def remember(graph: GraphLowering, file: str, source: str) -> None:
    """Record the frames of each line of a wrapper. ``graph`` is Inductor's ``GraphLowering``."""
    found: dict[int, tuple[ProgramFrame, ...]] = {}
    modules: dict[int, ModulePath] = {}
    for number, text in enumerate(source.splitlines(), 1):
        node = _of(graph, text)
        if node is not None:
            found[number] = _parsed(node.meta.get("stack_trace") or "")
            modules[number] = of_stack(_module_stack(node))
    names = traced_names(set(modules.values()))
    for number, module in modules.items():
        _module_at[file, number] = module, names[module]
    _files[file] = found
    if graph.is_backward:
        _backward.add(file)


def _module_stack(node: Node) -> Any:
    """The modules in which a node was traced, outermost first; None if unknown.

    A sum of gradients is not the gradient of an operator, and has no forward node: it belongs to
    the modules of its last term, which completes it.
    """
    while True:
        stack = node.meta.get("nn_module_stack") or node.meta.get(FORWARD_STACK)
        summed = node.meta.get("partitioner_tag") == "is_backward"
        if stack or FORWARD_STACK in node.meta or not summed or not node.all_input_nodes:
            return stack
        node = max(node.all_input_nodes)


def _of(graph: GraphLowering, text: str) -> Node | None:
    """The operator of one line: that of the buffer that it makes or fills."""
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


def _origin(buffer: Any) -> Node | None:
    """The operator that a buffer is the result of; of several fused ones, the last. One that only
    torch's own modules have called has a module and no line.
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
