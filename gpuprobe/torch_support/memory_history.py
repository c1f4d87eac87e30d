"""torch's memory history, of which a process has one, shared by gpuprobe and the program.

While `SharedHistory` is installed, the program gets what it would have had alone. gpuprobe records
until the program first does; from then on the history is the program's. Until then the program's
snapshots have no events, and the blocks and segments that were allocated meanwhile have no stacks
in any of its snapshots. Frames of gpuprobe are left out, and the entries of gpuprobe's own
snapshots.

torch's functions in C are replaced: those in Python (``torch.cuda.memory._record_memory_history``,
``_snapshot``, ``_dump_snapshot``, ``torch.cuda.memory_snapshot``) call them. Source:
``torch/csrc/cuda/memory_snapshot.cpp`` and ``c10/cuda/CUDACachingAllocator.cpp``: a history that is
switched off forgets its events, and its blocks keep their stacks; a snapshot is an entry itself, of
each device; a new limit holds for new entries (`_Ring`).
"""

from __future__ import annotations

import inspect
import linecache
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from types import ModuleType
from typing import Any, Final, NamedTuple

import torch

from gpuprobe.patching import Patches
from gpuprobe.torch_support.compiled_code import TORCH
from gpuprobe.user_frames import PACKAGE

MOST_ENTRIES: Final = 1_000_000
"""Entries of gpuprobe's history. torch's buffer holds about 100 bytes each, plus stacks."""
_SLACK: Final = 1000
"""Snapshots of gpuprobe's for which the program's history has room."""
_CALLS: Final = f"{TORCH}_ops.py"
_OPTIONS: Final = (
    "enabled", "context", "stacks", "max_entries", "clear_history", "compile_context",
    "global_record_annotations", "skip_actions",
)  # fmt: skip
_LEGACY: Final = (
    "enabled", "record_context", "record_context_cpp", "alloc_trace_max_entries",
    "alloc_trace_record_context", "clear_history", "compile_context", "global_record_annotations",
    "skip_actions",
)  # fmt: skip
"""The parameters of both functions in C, in their order."""
_Frames = list[dict[str, Any]]


class _Place(NamedTuple):
    device: int
    address: int
    segment: bool  # or its first block, which is at the same address


class _Local(threading.local):
    own = False
    """Whether gpuprobe itself calls torch in this thread."""


class SharedHistory:
    """torch's memory history. One instance exists, `history`."""

    def __init__(self) -> None:
        self._local = _Local()
        self._users = 0
        self._patches: Patches | None = None
        self._reset()

    def _reset(self) -> None:
        self._on = False
        self._started = False  # whether gpuprobe has ever recorded
        self.taken = False
        """Whether the program has recorded a history since the installation."""
        self._limit = 0  # of the program's entries; 0 for no other than torch's
        self._ambiguous = False  # whether the stack of a block does not show whose it is
        self._has_reads = True  # whether a snapshot is an entry
        self._hidden: dict[_Place, _Frames] = {}  # stacks of blocks that the program must not get
        self._own_reads: list[bool] = []  # snapshots with an entry, in order: if gpuprobe's
        # The program's entries, of each device, up to its last change of the limit.
        self._rings: list[_Ring] = []

    # -- gpuprobe's side

    def install(self) -> Callable[[], None]:
        """Share the history until the returned function is called, by everything that installed
        it.
        """
        self._users += 1
        if self._users == 1 and hasattr(torch._C, "_cuda_memorySnapshot"):
            self._install(Patches())
        ended = False

        def end() -> None:
            nonlocal ended
            if ended:
                return
            ended = True
            self._users -= 1
            if not self._users and self._patches is not None:
                self._patches.undo()
                self._patches = None

        return end

    def start(self) -> bool:
        """Record for gpuprobe, from an empty history on. False if the history is the program's."""
        if self.taken or (not self._on and self._is_enabled()):
            return False
        record = torch.cuda.memory._record_memory_history
        options: dict[str, Any] = {"stacks": "python", "max_entries": MOST_ENTRIES}
        if "clear_history" in inspect.signature(record).parameters:  # since torch 2.7
            options["clear_history"] = True
        self._started = True
        with self._as_own():
            record("all", **options)
        self._on = True
        return True

    def stop(self) -> None:
        """Switch the history off, if gpuprobe has started it and the program has not since."""
        if self._on:
            self._on = False
            with self._as_own():
                torch.cuda.memory._record_memory_history(None)

    @property
    def on(self) -> bool:
        """Whether gpuprobe records."""
        return self._on

    def read(self) -> dict[str, Any]:
        """The result of ``torch.cuda.memory._snapshot()``, for gpuprobe."""
        self._note_read(own=True)
        with self._as_own(), _without_compiler():
            found: dict[str, Any] = torch.cuda.memory._snapshot()
        return found

    @contextmanager
    def _as_own(self) -> Iterator[None]:
        before, self._local.own = self._local.own, True
        try:
            yield
        finally:
            self._local.own = before

    def _is_enabled(self) -> bool:
        if not torch.cuda.is_initialized():
            return False  # there is no allocator that could be queried
        with self._as_own():
            return bool(torch._C._cuda_isHistoryEnabled())

    def _note_read(self, *, own: bool) -> None:
        """A snapshot is taken: if the program records, that adds an entry of each device."""
        if self.taken and self._has_reads and self._is_enabled():
            self._own_reads.append(own)

    # -- the program's side

    def _install(self, patches: Patches) -> None:
        self._patches = patches
        linecache.getlines(__file__)  # for tracebacks: later, no file may be left to be opened
        self._reset()
        self.taken = self._is_enabled()
        functions: dict[str, Callable[..., Any]] = {
            "_cuda_record_memory_history": partial(self._recording, _OPTIONS),
            "_cuda_record_memory_history_legacy": partial(self._recording, _LEGACY),
            "_cuda_memorySnapshot": self._snapshot,
            "_cuda_isHistoryEnabled": self._enabled,
            "_cuda_allocationTraceback": self._traceback,
        }
        for name, shared in functions.items():
            original = getattr(torch._C, name, None)
            if original is not None:
                patches.set(torch._C, name, _Shared(original, shared, self._local))

    def _recording(
        self, names: Sequence[str], original: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """The program switches its history on or off."""
        options = dict(zip(names, args, strict=False)) | kwargs
        enabled = options["enabled"]
        if enabled and not self.taken:
            self.taken = True  # first: this call may initialise CUDA, where gpuprobe would begin
            if self._started:
                self._hidden = {place: piece["frames"] for place, piece in _stacks(self.read())}
            self.stop()
        forgets = not enabled or bool(options.get("clear_history"))
        snapshot: dict[str, Any] | None = None
        if not forgets and "clear_history" in options and self._is_enabled():
            snapshot = self.read()
            entries = snapshot["device_traces"]
            self._rings = [self._ring(device, entries) for device in range(len(entries))]
            options["clear_history"] = forgets = True
        elif forgets:
            self._rings = []
        if forgets:
            if self._ambiguous:  # the entries that are dropped distinguish blocks
                self._hide_stacks(snapshot or self.read())
            self._own_reads.clear()
        if enabled and "max_entries" in options:
            # More entries than the program's: gpuprobe's snapshots are entries, too.
            self._limit = 1 if enabled == "state" else options["max_entries"]
            self._ambiguous = bool(self._hidden) and options.get("stacks") == "python"
            all_matter = self._ambiguous or any(ring.entries for ring in self._rings)
            more = max(self._limit + _SLACK, MOST_ENTRIES if all_matter else 0)
            options |= {"enabled": "all", "max_entries": more}
            self._has_reads = "snapshot" not in (options.get("skip_actions") or ())
        # Those that newer versions of torch have added come last.
        return original(*options.values(), *args[len(names) :])

    def _enabled(self, original: Callable[[], bool]) -> bool:
        return self.taken and original()

    def _snapshot(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._note_read(own=False)
        found: dict[str, Any] = original(*args, **kwargs)
        traces = found["device_traces"]
        if not self.taken:  # all that there is comes from gpuprobe's history
            for _, piece in _stacks(found):
                piece["frames"] = []
            found["device_traces"] = [[] for _ in traces]
            return found
        rings = [self._ring(device, traces) for device in range(len(traces))]
        found["device_traces"] = [ring.in_order() for ring in rings]
        self._hide_stacks(found, traces)
        _drop_own_frames(found)
        return found

    def _traceback(self, original: Callable[[int], Any], address: int) -> Any:
        frames = original(address) if self.taken else None
        hidden = [stack for place, stack in self._hidden.items() if place.address == address]
        return None if not frames or frames in hidden else without_own(frames)

    def _hide_stacks(
        self, snapshot: dict[str, Any], traces: Sequence[Sequence[dict[str, Any]]] | None = None
    ) -> None:
        """Remove the stacks of blocks and segments that gpuprobe recorded. One at the same address
        with another stack, or with events in the program's history (``traces``), is another one.
        """
        if not self._hidden:
            return
        again = {
            _Place(device, entry["addr"], entry["action"] != "alloc")
            for device, entries in enumerate(traces or snapshot["device_traces"])
            for entry in entries
            if entry["action"] in ("alloc", "segment_alloc", "segment_map")
        }
        left: dict[_Place, _Frames] = {}
        for place, piece in _stacks(snapshot):
            if piece["frames"] == self._hidden.get(place) and place not in again:
                left[place] = piece["frames"]
                piece["frames"] = []
        self._hidden = left

    def _ring(self, device: int, traces: Sequence[list[dict[str, Any]]]) -> _Ring:
        """The program's entries now, without those of gpuprobe's snapshots. These are known by
        their order, from the last one on; the current snapshot has none yet.
        """
        entries = traces[device]
        if any(self._own_reads):
            own = iter(self._own_reads[-2::-1])
            newest = [
                entry
                for entry in reversed(entries)
                if entry["action"] != "snapshot" or not next(own, False)
            ]
            entries = newest[::-1]
        before = self._rings[device] if device < len(self._rings) else _Ring([], 0)
        return before.after(entries, self._limit)


class _Ring(NamedTuple):
    """torch's buffer of entries (`RingBuffer` in c10/cuda/CUDACachingAllocator.cpp): once there are
    as many as the limit, ``at`` is the place of the oldest one, which the next one replaces. A
    smaller limit removes none; those beyond it are never replaced.
    """

    entries: list[dict[str, Any]]
    at: int

    def after(self, new: list[dict[str, Any]], limit: int) -> _Ring:
        """With new entries, of a limit; 0: none."""
        if not self.entries:
            return _Ring(new[-limit:], 0)
        entries, at = list(self.entries), self.at
        for entry in new:
            if not limit or len(entries) < limit:
                entries.append(entry)
            elif at < len(entries):
                entries[at] = entry
                at = 0 if at + 1 == limit else at + 1
        return _Ring(entries, at)

    def in_order(self) -> list[dict[str, Any]]:
        return self.entries[self.at :] + self.entries[: self.at]


class _Shared:
    """A function of torch's, as the program calls it."""

    def __init__(self, original: Any, shared: Callable[..., Any], local: _Local) -> None:
        self._original = original
        self._shared = shared
        self._local = local
        self.__name__ = original.__name__
        self.__doc__ = original.__doc__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._local.own:
            return self._original(*args, **kwargs)
        return self._shared(self._original, *args, **kwargs)


def _pieces(snapshot: dict[str, Any]) -> Iterator[tuple[_Place, dict[str, Any]]]:
    """The segments and their blocks."""
    for segment in snapshot["segments"]:
        device = segment["device"]
        yield _Place(device, segment["address"], True), segment
        for block in segment["blocks"]:
            if "address" in block:  # since torch 2.1
                yield _Place(device, block["address"], False), block


def _stacks(snapshot: dict[str, Any]) -> Iterator[tuple[_Place, dict[str, Any]]]:
    """Those that have a stack."""
    return ((place, piece) for place, piece in _pieces(snapshot) if piece.get("frames"))


def _drop_own_frames(snapshot: dict[str, Any]) -> None:
    """`without_own` for all stacks. Entries that share a list still do."""
    known: dict[int, _Frames] = {}
    pieces = (piece for _, piece in _pieces(snapshot))
    for entry in chain(*snapshot["device_traces"], pieces):
        frames = entry.get("frames")
        if frames:
            shown = known.get(id(frames))
            if shown is None:
                shown = known[id(frames)] = without_own(frames)
                known[id(shown)] = shown
            entry["frames"] = shown


def without_own(frames: _Frames) -> _Frames:
    """A stack, innermost first, without gpuprobe's frames and those through which it calls an
    operator; the same list if there are none.
    """
    if not any(frame["filename"].startswith(PACKAGE) for frame in frames):
        return frames
    left: _Frames = []
    for frame in frames:
        if frame["filename"].startswith(PACKAGE):
            while left and left[-1]["filename"] == _CALLS:
                left.pop()
        else:
            left.append(frame)
    return left


class _NoCompiler(ModuleType):
    """``torch._inductor`` while a snapshot is taken, which searches it for generated code: without
    this, that imports the compiler. Others get the real one.
    """

    def __init__(self, thread: int) -> None:
        super().__init__("torch._inductor")
        self._thread = thread

    def __getattr__(self, name: str) -> Any:
        if threading.get_ident() == self._thread:
            raise AttributeError(name)
        import torch._inductor

        return getattr(torch._inductor, name)


@contextmanager
def _without_compiler() -> Iterator[None]:
    if "torch._inductor" in sys.modules:
        yield
        return
    placeholder = _NoCompiler(threading.get_ident())
    attributes = vars(torch)
    attributes["_inductor"] = placeholder
    try:
        yield
    finally:
        if attributes.get("_inductor") is placeholder:
            del attributes["_inductor"]


history: Final = SharedHistory()
"""The history of this process."""
