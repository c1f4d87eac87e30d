"""Functions of Python and torch that a program replaces."""

from __future__ import annotations

import builtins
import gc
import io
import json
import os
import pathlib
import random
import signal
import sys
import threading
import time
import warnings
from typing import Any

from parts import PLACES, Run, part

LATER = PLACES[1:]


def _refuses(name: str) -> Any:
    def refused(*args: Any, **options: Any) -> Any:
        raise RuntimeError(f"{name} is the program's")

    return refused


@part()
def replaces_open(run: Run) -> None:
    builtins.open = io.open = _refuses("open")


@part()
def replaces_functions_of_os(run: Run) -> None:
    names = ("write", "open", "close", "fstat", "stat", "getpid", "fork", "replace", "mkdir")
    for name in names:
        setattr(os, name, _refuses(name))


@part()
def counts_calls_of_os(run: Run) -> None:
    """As a test does that follows what a library writes."""
    original, paths = os.open, []
    recording = os.environ["FAULTS_RECORDING"]  # another part deletes it, where there is one

    def counting(path: Any, *args: Any, **options: Any) -> int:
        # torch's import opens os.devnull, in the program or, with --hazards, before it
        if not str(path).startswith(recording) and path != os.devnull:
            paths.append(path)
        return original(path, *args, **options)

    os.open = counting
    run.later.append(lambda: run.note("opened", len(paths)))


@part()
def replaces_json(run: Run) -> None:
    json.dumps = json.dump = json.loads = _refuses("json")  # type: ignore[assignment]


@part()
def replaces_the_clocks(run: Run) -> None:
    for name in ("time", "monotonic", "perf_counter", "time_ns", "monotonic_ns"):
        setattr(time, name, lambda: 1)


@part()
def replaces_the_clocks_by_one_that_fails(run: Run) -> None:
    for name in ("time", "time_ns", "perf_counter", "perf_counter_ns", "monotonic_ns"):
        setattr(time, name, _refuses(name))


@part()
def replaces_paths(run: Run) -> None:
    for name in ("write_text", "mkdir", "exists", "open", "cwd"):
        setattr(pathlib.Path, name, _refuses(name))


@part()
def replaces_threads(run: Run) -> None:
    threading.Thread.start = _refuses("start")


@part()
def replaces_builtins(run: Run) -> None:
    builtins.print = lambda *args, **options: None
    builtins.repr = lambda value: "replaced"  # type: ignore[assignment]


@part()
def replaces_signal(run: Run) -> None:
    signal.signal = signal.getsignal = _refuses("signal")


@part("backward", "step", "end")
def replaces_the_import(run: Run) -> None:
    """After the simulated GPU's own imports, which both runs have."""
    original = builtins.__import__

    def importing(name: str, *args: Any, **options: Any) -> Any:
        if name.startswith("gpuprobe") and name not in sys.modules:
            raise ImportError(f"{name} is not for this program")
        return original(name, *args, **options)

    builtins.__import__ = importing


@part()
def has_a_trace_function(run: Run) -> None:
    calls = []

    def trace(frame: Any, event: str, argument: object) -> None:
        if frame.f_code.co_filename.endswith("program.py"):
            calls.append((frame.f_code.co_name, event))

    sys.settrace(trace)
    threading.settrace(trace)
    run.later.append(lambda: run.note("traced", calls, sys.gettrace() is trace))


@part()
def has_a_profile_function(run: Run) -> None:
    calls = []

    def profile(frame: Any, event: str, argument: object) -> None:
        if frame.f_code.co_filename.endswith("program.py") and event in ("call", "return"):
            calls.append((frame.f_code.co_name, event))

    sys.setprofile(profile)
    run.later.append(lambda: run.note("profiled", calls, sys.getprofile() is profile))


@part()
def collects_all_the_time(run: Run) -> None:
    gc.set_threshold(5, 2, 2)
    run.later.append(lambda: run.note(gc.get_threshold(), gc.isenabled()))


@part()
def has_callbacks_of_the_collector(run: Run) -> None:
    phases = []
    gc.callbacks.append(lambda phase, info: phases.append(phase))
    gc.collect()
    run.note("collected", phases[:2], len(gc.callbacks))
    gc.callbacks.clear()


@part()
def makes_warnings_errors(run: Run) -> None:
    warnings.simplefilter("error")


@part()
def clears_the_path_of_modules(run: Run) -> None:
    sys.path.clear()
    sys.path_importer_cache.clear()


@part("step", "end")
def finds_no_new_modules(run: Run) -> None:
    """After torch's own imports, some of which gpuprobe has in other places."""
    run.kept.append(sys.meta_path[:])
    sys.meta_path.clear()
    run.later.append(lambda: sys.meta_path.extend(run.kept[-1] if not sys.meta_path else ()))


@part()
def audits_what_is_opened(run: Run) -> None:
    denied = os.environ["FAULTS_RECORDING"]

    def audit(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and str(arguments[0]).startswith(denied):
            raise PermissionError(f"{arguments[0]} is not for this program")

    sys.addaudithook(audit)


@part()
def seeds_its_numbers(run: Run) -> None:
    random.seed(5)
    run.later.append(lambda: run.note(random.random()))


@part(*LATER)
def draws_numbers_of_torch(run: Run) -> None:
    import torch

    torch.manual_seed(4)
    run.later.append(lambda: run.note_tensors("drawn", [torch.rand(3), torch.randperm(5)]))


@part(*LATER)
def replaces_methods_of_torch(run: Run) -> None:
    import torch
    from torch import nn

    backward, call, step = torch.Tensor.backward, nn.Module.__call__, torch.optim.SGD.step
    calls: list[str] = []

    def backward_too(*args: Any, **options: Any) -> Any:
        calls.append("backward")
        return backward(*args, **options)

    def call_too(*args: Any, **options: Any) -> Any:
        calls.append("call")
        return call(*args, **options)

    def step_too(*args: Any, **options: Any) -> Any:
        calls.append("step")
        return step(*args, **options)

    torch.Tensor.backward = backward_too
    nn.Module.__call__ = call_too
    torch.optim.SGD.step = step_too
    run.later.append(lambda: run.note(calls))


@part(*(place for place in LATER if place != "forward"))
def has_hooks_of_all_modules(run: Run) -> None:
    """Not in a forward pass: a watcher's own hook makes torch call them for that one, too."""
    from torch import nn

    names: list[str] = []
    nn.modules.module.register_module_forward_hook(lambda module, *rest: names.append("forward"))
    nn.modules.module.register_module_full_backward_hook(lambda *rest: names.append("backward"))
    run.later.append(lambda: run.note(names))


@part(*LATER)
def has_modes_of_torch(run: Run) -> None:
    import torch
    from torch.overrides import TorchFunctionMode
    from torch.utils._python_dispatch import TorchDispatchMode

    class Functions(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            run.note("function", getattr(func, "__name__", func))
            return func(*args, **(kwargs or {}))

    class Operators(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            run.note("operator", func)
            return func(*args, **(kwargs or {}))

    with Functions(), Operators():
        (torch.ones(3, device=run.device) * 2).sum()


@part()
def changes_how_threads_switch(run: Run) -> None:
    sys.setswitchinterval(1e-5)
    run.later.append(lambda: run.note(sys.getswitchinterval()))


@part()
def prints_its_modules_and_arguments(run: Run) -> None:
    main = sys.modules["__main__"]
    run.note(sys.argv[1:], __name__, main.__name__, os.path.basename(main.__file__ or ""))
    run.note(sys.flags.optimize, sys.dont_write_bytecode, sys.flags.dev_mode, sys.flags.isolated)
