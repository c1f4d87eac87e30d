"""Follows torch's compiler in this process: graphs, graph breaks and recompilations become notes,
and generated code is matched with lines and modules of the program.

A recording starts it. It imports nothing: it waits until the program's first
compilation has imported Dynamo and Inductor. If a torch lacks one of the functions that it wraps,
that becomes a note, and the rest is followed.

Code from torch's cache has neither lines nor modules. On a GPU that becomes a note: compiling again
may take minutes there. On a simulated GPU each recording must be the same as the first, so graphs
and the choices between kernels do not come from the cache; kernels still do, which take most of the
time.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Final

import torch

from gpuprobe.model.place import program_name
from gpuprobe.patching import patch, when_imported
from gpuprobe.torch_support import compile_notes, compiled_code
from gpuprobe.torch_support.memory_history import history
from gpuprobe.torch_support.process_gpus import takes_time
from gpuprobe.user_frames import PACKAGE, file_and_line

_ALLOCATED: Final = re.compile(r" = empty_strided_\w+\(")
_COMPILATION: Final = re.compile(r"^\d+/\d+: ")
"""torch's number of the compilation whose guard failed."""
_HANDLED_KEY: Final = "BackendSelect, Fake,"
"""In the reason if the two sets of dispatch keys differ by that of `operator_calls`."""
_CACHES: Final = (("aot_autograd", "autograd_cache_hit"), ("inductor", "fxgraph_cache_hit"))
"""In ``torch._dynamo.utils.counters``."""
_CACHED: Final = ("fx_graph_cache", "autotune_local_cache")
"""Inductor's settings for what a later process would find: graphs, and the fastest variants of
kernels. The first process measures these on copies of tensors, which are part of its peak."""
_NOTED_WITHIN: Final = ("should_compile_partial_graph=False", "Should not compile partial graph")
"""The texts that an inlined function raises, up to torch 2.9, when its graph break has been
logged."""

_users = 0
_undo: list[Callable[[], object]] = []


def start() -> Callable[[], None]:
    """Follow the compiler. Returns a function that ends this; calling it twice does no harm."""
    global _users
    if not _users:
        for module, follow in _FOLLOWED.items():
            _undo.append(when_imported(module, _guarded(module, follow)))
    _users += 1
    from_cache = _hits()
    ended = False

    def stop() -> None:
        global _users
        nonlocal ended
        if ended:
            return
        ended = True
        if more := _hits() - from_cache:
            compile_notes.note(
                f"compiled code came from torch's cache ({more} {'time' if more == 1 else 'times'})"
                ": its memory is attributed to generated files "
                "(TORCHINDUCTOR_FORCE_DISABLE_CACHES=1 compiles it again)"
            )
        _users -= 1
        while _undo and not _users:
            _undo.pop()()

    return stop


def _hits() -> int:
    """The number of times that compiled code was found in a cache so far."""
    utils: Any = sys.modules.get("torch._dynamo.utils")
    if utils is None:
        return 0
    return max(int(utils.counters[group][name]) for group, name in _CACHES)


def _guarded(module: str, follow: Callable[[Any], None]) -> Callable[[], None]:
    def install() -> None:
        try:
            follow(sys.modules[module])
        except AttributeError as error:
            compile_notes.note(
                f"torch {torch.__version__}: its compiler cannot be followed in {module} ({error})"
            )

    return install


def _safely(work: Callable[[], None], name: str) -> None:
    """Run ``work``; an internal error becomes a note, and does not reach the program."""
    try:
        work()
    except Exception as error:  # noqa: BLE001 - it is in the notes
        compile_notes.note(f"{name} could not be noted ({type(error).__name__}: {error})")


def _breaks(module: Any) -> None:
    # A method that gets the exception; up to torch 2.9 a function that gets stack and text.
    owner = module.InstructionTranslatorBase
    if not hasattr(owner, "log_graph_break"):
        owner = module
    log = owner.log_graph_break
    parameters = inspect.signature(log)

    def log_graph_break(*args: Any, **options: Any) -> None:
        arguments = parameters.bind(*args, **options).arguments
        _safely(lambda: _note_break(arguments), "a graph break")
        log(*args, **options)

    _undo.append(patch(owner, "log_graph_break", log_graph_break))


def _note_break(arguments: Mapping[str, Any]) -> None:
    exc = arguments.get("exc")
    if exc is not None:
        if exc.logged:
            return
        stack, what = getattr(exc, "real_stack", None), str(exc).strip()
    else:
        stack, what = arguments.get("user_stack"), arguments["reason"].removeprefix("Unsupported: ")
        if what.startswith(_NOTED_WITHIN):
            return
        if stack is None:
            stack = torch._guards.TracingContext.extract_stack()
    # gpuprobe's hooks are inlined in the program's function.
    stack = [frame for frame in stack or () if not frame.filename.startswith(PACKAGE)]
    code = arguments["code_options"]
    file, line = (
        (stack[-1].filename, stack[-1].lineno)
        if stack
        else (code["co_filename"], code["co_firstlineno"])
    )
    compile_notes.note(f"graph break at {file_and_line(file, line)}: {what.partition(chr(10))[0]}")


def _recompilations(module: Any) -> None:
    name = "get_and_maybe_log_recompilation_reasons"
    if not hasattr(module, name):
        name = name[:-1]
    reasons_of = getattr(module, name)

    def recompilation(entries: Any, frame: FrameType, *args: Any, **options: Any) -> Any:
        found = reasons_of(entries, frame, *args, **options)
        if entries:
            _safely(lambda: _note_again(frame.f_code, found), "a recompilation")
        return found

    _undo.append(patch(module, name, recompilation))


def _note_again(code: CodeType, reasons: Sequence[str]) -> None:
    known = _COMPILATION.sub("", reasons[0]).strip() if reasons else ""
    reason = known.partition("\n")[0] or "no guard is known"
    if _HANDLED_KEY in reason:
        reason = "gpuprobe began or ended after it was compiled"
    where = file_and_line(code.co_filename, code.co_firstlineno)
    compile_notes.note(f"{program_name(code.co_name)} at {where}{compile_notes.AGAIN}{reason}")


def _graphs(module: Any) -> None:
    lowering = module.GraphLowering
    original = lowering._compile_to_module

    def compile_to_module(graph: Any) -> Any:
        made = original(graph)
        file = getattr(made, "__file__", None)
        if file:
            _safely(lambda: _note_graph(graph, file), "a graph")
        return made

    _undo.append(patch(lowering, "_compile_to_module", compile_to_module))
    # Nodes that Inductor's passes put in the place of a backward node belong to the same modules.
    kept = torch.fx.proxy._COPY_META_FIELDS
    kept.append(compiled_code.FORWARD_STACK)
    _undo.append(lambda: kept.remove(compiled_code.FORWARD_STACK))


def _calls(module: Any) -> None:
    kind = module.CompiledFxGraph
    original = kind.__call__

    def call(graph: Any, inputs: Any) -> Any:
        if history.on:
            backward = bool(graph.fx_kwargs.get("is_backward"))
            _safely(lambda: compiled_code.note_call(backward=backward), "a call")
        return original(graph, inputs)

    _undo.append(patch(kind, "__call__", call))


def _settings(module: Any) -> None:
    if takes_time():
        return
    for name in _CACHED:
        if hasattr(module, name):
            _undo.append(partial(setattr, module, name, getattr(module, name)))
            setattr(module, name, False)


def _note_graph(graph: Any, file: str) -> None:
    source = Path(file).read_text(encoding="utf-8")
    allocated, reused = len(_ALLOCATED.findall(source)), source.count("# reuse")
    compile_notes.note_graph(
        f"{'backward' if graph.is_backward else 'forward'} graph: {allocated} "
        f"{'buffer' if allocated == 1 else 'buffers'} allocated, {reused} in the memory of others"
    )
    compiled_code.remember(graph, file, source)


def skip_own_frames(module: Any) -> Callable[[], None]:
    """Make Dynamo skip gpuprobe's functions that a program calls after a graph break, as it skips
    torch's: compiled, a hook would do nothing, and torch's function that it wraps would be traced
    like the program's own. Calls within a graph are still inlined. ``module``:
    ``torch._dynamo.trace_rules``.

    Returns a function that ends this.
    """
    check = module.check

    def skipped(code: Any, is_inlined_call: bool = False, *args: Any, **options: Any) -> Any:
        own = isinstance(code, CodeType) and code.co_filename.startswith(PACKAGE)
        if own and not is_inlined_call:
            return True
        return check(code, is_inlined_call, *args, **options)

    return patch(module, "check", skipped)


_FOLLOWED: Final[dict[str, Callable[[Any], None]]] = {
    "torch._dynamo.trace_rules": lambda module: _undo.append(skip_own_frames(module)),
    "torch._dynamo.symbolic_convert": _breaks,
    "torch._dynamo.convert_frame": _recompilations,
    "torch._inductor.config": _settings,
    "torch._inductor.graph": _graphs,
    "torch._inductor.output_code": _calls,
}
