"""What the allocator's history on CUDA does not contain: which module ran, a model's inputs, and
the line that called the backward pass.

A snapshot has the program's stack for each block, and a stack has code, not modules. For the
backward pass it has less: the autograd engine has a C++ thread for each device, so a block that is
allocated there has no Python stack, or only the frames of a hook or a custom function. The thread
that called ``backward`` waits meanwhile, so its stack belongs below.

So the calls of a step are noted with their times on the clock of the history (the Unix epoch, in
microseconds), and merged into its events when the step ends. Between a hook and the operators on
either side of it Python runs for longer than a microsecond, which is the precision of the times.
"""

from __future__ import annotations

import functools
import sys
import threading
import weakref
from array import array
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

from gpuprobe.clocks import time_ns
from gpuprobe.model.actions import ALLOC
from gpuprobe.model.memory import Category
from gpuprobe.model.trace import EventColumns, Frame, MemoryTrace
from gpuprobe.sampler.tracing.tensors import named_modules, passed_tensors, plain_tensors
from gpuprobe.user_frames import program_stack

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module

_INPUT = Category.INPUT.code
_STATE = Category.KV_CACHE.code
# Kinds of marks, in addition to `_INPUT`; the later ones of this order have priority.
_KEPT_IF_MADE = 1_000
_KEPT = 1_001


class ModuleNames:
    """The names of modules, ``Class.dotted.path``, from the models that contain them. Modules are
    distinguished by identity: ``==`` of tensordict's modules compares their tensors.
    """

    def __init__(self) -> None:
        self.by_id: dict[int, tuple[weakref.ref[Module], str]] = {}

    def add(self, roots: Iterable[Module]) -> None:
        """Name every module below these roots."""
        for root in roots:
            for name, module in named_modules(root):
                gone = functools.partial(_forget, self.by_id, id(module))
                self.by_id[id(module)] = weakref.ref(module, gone), name

    def of(self, module: Module) -> str:
        """The name of a module. One that is below no named root is a root itself."""
        if id(module) not in self.by_id:
            self.add([module])
        return self.by_id[id(module)][1]


def _forget(names: dict[int, tuple[weakref.ref[Module], str]], number: int, _: object) -> None:
    names.pop(number, None)


class ModuleCalls:
    """The module calls of one step, from `begin` on. Between traced steps only the running modules
    are kept: a step may begin inside one.
    """

    def __init__(self) -> None:
        self._names = ModuleNames()
        self._named = self._names.by_id
        self.stack: list[str] = []
        """The modules that are running, the innermost last."""
        self._on = False
        self._since = array("q")  # microseconds; from then on `_module` was running
        self._module: list[str] = []
        self._inputs: list[tuple[int, str, int, int]] = []  # time, device, address, kind

    def begin(self) -> None:
        """A step that is traced begins."""
        self.end()
        self._on = True
        if self.stack:
            self._since.append(0)
            self._module.append(self.stack[-1])

    def end(self) -> None:
        """Forget the calls: nothing is traced now."""
        self._on = False
        self._since = array("q")
        self._module = []
        self._inputs = []

    def name_modules(self, roots: Iterable[Module]) -> None:
        """Name the modules of these models."""
        self._names.add(roots)

    @property
    def running(self) -> str:
        """The module that is running; "" outside all modules."""
        return self.stack[-1] if self.stack else ""

    def enter_module(self, module: Module) -> None:
        name = self._names.of(module)
        self.stack.append(name)
        if self._on:
            self._since.append(time_ns() // 1000)
            self._module.append(name)

    def enter_inner(self, module: Module) -> bool:
        """`enter_module` inside of another one, if the module has a name; else False. It cannot
        fail, and needs no guard.
        """
        # It calls nothing in Python: a program may recurse as deep as without it.
        known = self._named.get(id(module)) if self.stack else None
        if known is None:
            return False
        self.stack.append(known[1])
        if self._on:
            self._since.append(time_ns() // 1000)
            self._module.append(known[1])
        return True

    def leave_module(self) -> None:
        if self.stack:
            self.stack.pop()
            if self._on:
                self._since.append(time_ns() // 1000)
                self._module.append(self.stack[-1] if self.stack else "")

    def mark_inputs(self, values: object, *, inference: bool = False) -> None:
        """A model is called with these. In inference, tensors that modules made in earlier calls
        and those that caches hold are kept state.
        """
        for value, state in passed_tensors(values) if self._on else ():
            kind = _KEPT if inference and state else _KEPT_IF_MADE if inference else _INPUT
            self._mark(value, kind)

    def mark_kept(self, values: object) -> None:
        """A model returned these: the tensors that caches hold are kept state."""
        for value, state in passed_tensors(values) if self._on else ():
            if state:
                self._mark(value, _KEPT)

    def _mark(self, tensor: Tensor, kind: int) -> None:
        for plain in plain_tensors(tensor):
            if plain.is_cuda:
                address = plain.untyped_storage().data_ptr()
                self._inputs.append((now_us(), str(plain.device), address, kind))

    def complete(self, trace: MemoryTrace) -> None:
        """Set the module of the blocks allocated during the trace, and the category of inputs. The
        trace's columns must be filled. A history without times is not modified.
        """
        events = trace.events
        times = events.time_us
        if not times or not times[0]:
            return
        indices = [trace.stacks.string(name) for name in self._module]
        for now, since in enumerate(self._since):
            first = bisect_right(times, since - 1)
            last = len(times)
            if now + 1 < len(self._since):
                last = bisect_right(times, self._since[now + 1] - 1)
            if indices[now] and first < last:
                events.module[first:last] = array("I", [indices[now]]) * (last - first)
        marks = {
            (at, address, k) for at, where, address, k in self._inputs if where == trace.device
        }
        made: dict[int, list[int]] = {address: [] for _, address, _ in marks}
        for row, (action, address) in enumerate(zip(events.action, events.address, strict=True)):
            if action == ALLOC and address in made:
                made[address].append(row)
        before = {address: row for row, address in enumerate(trace.baseline.address)}
        for at, address, kind in sorted(marks, key=lambda mark: mark[2]):
            rows = made[address]
            owner = bisect_right(rows, at, key=times.__getitem__) - 1
            if owner >= 0:
                columns, row = events, rows[owner]
            elif address in before and not trace.baseline.category[before[address]]:
                columns, row = trace.baseline, before[address]
            else:
                continue
            kept = kind == _KEPT or (kind == _KEPT_IF_MADE and columns.module[row])
            if kept or columns.category[row] != _STATE:
                columns.category[row] = _STATE if kept else _INPUT
        if any(kind != _INPUT for _, _, kind in marks):
            _name_kept(events)


def _name_kept(events: EventColumns) -> None:
    """Set the category *kv_cache* for tensors made by modules on lines where most are kept: the
    last one of a sequence was made like those before it, but no call followed that got it.
    """
    made = [row for row, action in enumerate(events.action) if action == ALLOC]
    all_ = Counter(events.stack[row] for row in made)
    kept = Counter(events.stack[row] for row in made if events.category[row] == _STATE)
    for row in made:
        stack, named = events.stack[row], events.category[row]
        usual = stack and 2 * kept[stack] > all_[stack]
        if usual and not named and events.module[row]:
            events.category[row] = _STATE


def now_us() -> int:
    """The time on the clock of the allocator's history: microseconds since the Unix epoch."""
    return time_ns() // 1000


_THREADING: Final = threading.__file__


class BackwardCalls:
    """The backward passes of one step, from `begin` on. A call may begin before the step does."""

    def __init__(self) -> None:
        self._running: list[tuple[Frame, ...]] = []
        self._on = False
        self._since = array("q")  # microseconds; from then on `_call` was running
        self._call: list[tuple[Frame, ...]] = []

    def begin(self) -> None:
        """A step that is traced begins."""
        self.end()
        self._on = True
        if self._running:
            self._since.append(0)
            self._call.append(self._running[-1])

    def end(self) -> None:
        """Forget the calls: nothing is traced now."""
        self._on = False
        self._since = array("q")
        self._call = []

    @property
    def running(self) -> tuple[Frame, ...]:
        """The stack of the call that is running, innermost first; () outside all calls."""
        return self._running[-1] if self._running else ()

    def called(self) -> None:
        """The program calls the engine. The stack of a nested call, in a thread of the engine,
        continues with that of the outer call.
        """
        frames = tuple(program_stack(sys._getframe()))
        if self._running:
            frames = _below(frames, self._running[-1])
        self._running.append(frames)
        self._note()

    def returned(self) -> None:
        """The engine returned, or raised."""
        if self._running:
            self._running.pop()
            self._note()

    def _note(self) -> None:
        if self._on:
            self._since.append(now_us())
            self._call.append(self.running)

    def complete(self, trace: MemoryTrace) -> None:
        """Complete the stacks of the events of the engine's threads."""
        events, table = trace.events, trace.stacks
        times = events.time_us
        if not times or not times[0]:
            return
        completed: dict[tuple[int, tuple[Frame, ...]], int] = {}
        for now, (since, call) in enumerate(zip(self._since, self._call, strict=True)):
            if not call:
                continue
            first = bisect_right(times, since - 1)
            last = len(times)
            if now + 1 < len(self._since):
                last = bisect_right(times, self._since[now + 1])
            for row in range(first, last):
                key = events.stack[row], call
                if key not in completed:
                    frames = _below(table.frames_of(key[0]), call)
                    completed[key] = table.stack(tuple(map(table.frame, frames)))
                events.stack[row] = completed[key]


def _below(frames: tuple[Frame, ...], call: tuple[Frame, ...]) -> tuple[Frame, ...]:
    """``frames`` with those of the call below, unless they belong to the thread that called, or to
    one that the program started.
    """
    if frames and (frames[-1] == call[-1] or frames[-1].filename == _THREADING):
        return frames
    return *frames, *call
