"""Torch's memory history and statistics, the depth of the stack, and memory that runs out."""

from __future__ import annotations

import gc
import os
import signal
import sys
import time
import weakref
from typing import Any

from parts import PLACES, Run, part

LATER = PLACES[1:]


def _history(run: Run, **settings: Any) -> None:
    """What a program gets of a history that it starts: now, and after every later step."""
    import torch

    if run.device != "cuda":
        run.note("no history on the CPU")
        return
    torch.cuda.memory._record_memory_history(**settings)
    _uses_memory(run)
    _note_history(run)
    run.later.append(lambda: _note_history(run))


def _uses_memory(run: Run) -> None:
    import torch

    for size in (100, 300_000, 5_000_000):
        tensor = torch.zeros(size, device=run.device)
        del tensor
    run.kept.append(torch.ones(10, device=run.device))


def _note_history(run: Run) -> None:
    import torch

    snapshot = torch.cuda.memory._snapshot()
    for trace in snapshot["device_traces"]:
        events = [(event["action"], event["size"]) for event in trace]
        stacks = [_own(event.get("frames", ())) for event in trace]
        run.note("history", len(events), events[-30:], sum(map(len, stacks)), stacks[-1:])
    blocks = [
        (block["size"], block["state"], len(_own(block.get("frames", ()))))
        for segment in snapshot["segments"]
        for block in segment["blocks"]
    ]
    run.note("blocks", blocks)


def _own(frames: Any) -> list[str]:
    """The names of the program's own frames."""
    here = os.path.dirname(__file__)
    return [frame["name"] for frame in frames if os.path.dirname(frame["filename"]) == here]


@part(*LATER)
def has_a_history(run: Run) -> None:
    _history(run, max_entries=run.choose.choice((3, 10, 1000, 100_000)))


@part(*LATER)
def has_a_history_of_python(run: Run) -> None:
    _history(run, max_entries=1000, stacks="python")


@part(*LATER)
def has_a_history_of_the_state(run: Run) -> None:
    _history(run, enabled="state", context=run.choose.choice(("state", "alloc", "all")))


@part(*LATER)
def has_a_history_without_stacks(run: Run) -> None:
    _history(run, enabled="all", context=None)


@part(*LATER)
def ends_its_history(run: Run) -> None:
    import torch

    _history(run, max_entries=500)
    if run.device == "cuda":
        torch.cuda.memory._record_memory_history(enabled=None)
        _note_history(run)


@part(*LATER)
def reads_a_history_that_it_has_not_started(run: Run) -> None:
    if run.device == "cuda":
        _uses_memory(run)
        _note_history(run)


@part(*LATER)
def dumps_its_history(run: Run) -> None:
    import pickle

    import torch

    if run.device == "cuda":
        # C++'s stacks contain the frames of what calls an operator: a file's limit may cut them.
        torch.cuda.memory._record_memory_history(stacks="python", max_entries=100)
        _uses_memory(run)
        path = run.folder / "snapshot.pickle"
        try:
            torch.cuda.memory._dump_snapshot(str(path))
            snapshot = pickle.loads(path.read_bytes())
        finally:  # it contains times, also where a limit has cut it
            path.unlink(missing_ok=True)
        traces = snapshot["device_traces"]
        run.note("dumped", [[event["action"] for event in trace] for trace in traces])


@part(*LATER)
def has_statistics(run: Run) -> None:
    import torch

    if run.device == "cuda":
        _uses_memory(run)
        stats = torch.cuda.memory_stats()
        run.note({name: value for name, value in stats.items() if value and "time" not in name})
        run.note(torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved())
        torch.cuda.reset_peak_memory_stats()


@part(*LATER)
def runs_out_of_memory(run: Run) -> None:
    import torch

    try:
        torch.empty(2**44, device=run.device)
    except (torch.OutOfMemoryError, RuntimeError) as error:
        run.note(type(error).__name__, len(str(error).splitlines()))
    try:
        bytearray(2**60)
    except MemoryError as error:
        run.note("memory", error)


@part(*LATER)
def observes_that_memory_runs_out(run: Run) -> None:
    import torch

    if run.device != "cuda":
        return
    torch._C._cuda_attach_out_of_memory_observer(lambda *sizes: run.note("observed", *sizes[:2]))
    try:
        torch.empty(2**44, dtype=torch.uint8, device="cuda")
    except torch.OutOfMemoryError:
        run.note("out of memory")


# -- depth


def _depth(run: Run, level: int = 0) -> int:
    try:
        return _depth(run, level + 1)
    except RecursionError:
        return level


@part(started=True)
def counts_how_deep_it_may_recurse(run: Run) -> None:
    run.note("depth", _depth(run), sys.getrecursionlimit())


@part(started=True)
def may_recurse_deeper(run: Run) -> None:
    sys.setrecursionlimit(5000)
    run.note("deeper", _depth(run), sys.getrecursionlimit())


@part("model", "step", "end", started=True)
def may_recurse_little(run: Run) -> None:
    frame, depth = sys._getframe(), 0
    while frame.f_back is not None and not frame.f_code.co_filename.endswith("program.py"):
        frame, depth = frame.f_back, depth + 1
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(before - 100)
    run.note("little", depth, _depth(run))
    sys.setrecursionlimit(before)


@part(started=True)
def recurses_by_calls_of_its_own(run: Run) -> None:
    class Nested:
        def __repr__(self) -> str:
            return repr(self)

    try:
        repr(Nested())
    except RecursionError as error:
        run.note(str(error)[:50])


@part(*LATER)
def recurses_through_modules(run: Run) -> None:
    from torch import nn

    class Again(nn.Module):
        def forward(self, value: Any) -> Any:
            return self(value)

    try:
        Again()(1)
    except RecursionError:
        run.note("through modules")  # how often depends on how torch calls modules with hooks


@part(*LATER)
def catches_everything_around_a_step(run: Run) -> None:
    import torch
    from torch import nn

    for raised in (MemoryError, KeyboardInterrupt, SystemExit, GeneratorExit, RecursionError):

        def hook(*args: object, raised: Any = raised) -> None:
            raise raised("in a hook")

        layer = nn.Linear(2, 2, device=run.device)
        layer.register_forward_hook(hook)
        try:
            layer(torch.ones(1, 2, device=run.device)).sum().backward()
        except BaseException as error:
            run.note("caught", type(error).__name__, error.args)


@part(*LATER)
def is_interrupted_in_a_hook(run: Run) -> None:
    import torch
    from torch import nn

    def hook(*args: object) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.01)

    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    layer = nn.Linear(2, 2, device=run.device)
    layer.register_forward_hook(hook)
    try:
        layer(torch.ones(1, 2, device=run.device))
    except KeyboardInterrupt as error:
        run.note("interrupted", error.args)
    signal.signal(signal.SIGINT, previous)


# -- collection


@part(*LATER)
def follows_when_objects_end(run: Run) -> None:
    import torch

    tensor = torch.ones(9, device=run.device)
    weakref.finalize(tensor, run.note, "tensor ended")
    module = torch.nn.Linear(2, 2, device=run.device)
    weakref.finalize(module, run.note, "module ended")
    module(torch.ones(1, 2, device=run.device))
    run.note(sys.getrefcount(tensor), sys.getrefcount(module.weight))
    del tensor, module
    run.note("deleted")


@part()
def collects_alone(run: Run) -> None:
    gc.disable()
    gc.collect()
    run.note(gc.isenabled(), gc.get_threshold(), len(gc.garbage), len(gc.callbacks))


@part(*LATER)
def uses_a_graph_twice(run: Run) -> None:
    import torch

    one = torch.ones(3, device=run.device, requires_grad=True)
    loss = (one * one).sum()
    loss.backward()
    try:
        loss.backward()
    except RuntimeError as error:
        run.note(str(error)[:40])
