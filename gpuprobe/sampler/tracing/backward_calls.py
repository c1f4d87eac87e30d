"""The line that called the backward pass, for what the autograd engine allocates.

For each device the engine has a thread of its own, in C++: the allocator's history has no Python
stack of what is allocated there, or the frames of a hook or a custom function alone. The thread
that called ``backward`` waits meanwhile, so its stack belongs below. Calls are noted with their
times on the clock of the history, as `module_calls` notes modules.
"""

from __future__ import annotations

import sys
import threading
from array import array
from bisect import bisect_right
from typing import Any, Final

from gpuprobe.code_origin import PACKAGE, name_of
from gpuprobe.model.trace import Frame, MemoryTrace
from gpuprobe.sampler.tracing.module_calls import now_us

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
        """Forget the notes: nothing is traced now."""
        self._on = False
        self._since = array("q")
        self._call = []

    @property
    def running(self) -> tuple[Frame, ...]:
        """The stack of the call that is running, innermost first; () outside all calls."""
        return self._running[-1] if self._running else ()

    def called(self) -> None:
        """The program calls the engine. A call within another one, in a thread of the engine, has
        the stack of that one below its own.
        """
        frames = _frames()
        if self._running:
            frames = _below(frames, self._running[-1])
        self._running.append(frames)
        self._note()

    def returned(self) -> None:
        """The engine is done, or has raised."""
        if self._running:
            self._running.pop()
            self._note()

    def _note(self) -> None:
        if self._on:
            self._since.append(now_us())
            self._call.append(self.running)

    def lay_over(self, trace: MemoryTrace) -> None:
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
    """``frames`` with those of the call below, unless they are of the thread that called, or of one
    that the program started.
    """
    if frames and (frames[-1] == call[-1] or frames[-1].filename == _THREADING):
        return frames
    return *frames, *call


def _frames() -> tuple[Frame, ...]:
    """The stack of the program here, innermost first."""
    found = []
    frame: Any = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if not code.co_filename.startswith(PACKAGE):
            found.append(Frame(name_of(code.co_filename), frame.f_lineno or 0, code.co_name))
        frame = frame.f_back
    return tuple(found)
