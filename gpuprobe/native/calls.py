"""The calls of this process to CUDA and NCCL, in order, with the operator that made each
(``runtime/log.c``)."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from typing import Final

from gpuprobe.errors import EnvironmentUnavailable
from gpuprobe.model.run.work import Action
from gpuprobe.native.process import LogKind, Runtime
from gpuprobe.torch_support.engine_reports import GpuCall

_ENTRY: Final = struct.Struct("<8xQQ8xQQIIi3I2I4x4xII")
"""A ``log_entry``: stream, a, bytes, name; kind, thread, device; grid, two of the block's numbers;
operator, whether it was captured. Skipped are time, b, the block's third, and shared memory."""
_MANY: Final = 8192
_MOST: Final = 4_000_000

_ACTIONS: Final = {
    LogKind.OPERATOR: Action.OPERATOR,
    LogKind.LAUNCH: Action.KERNEL,
    LogKind.LIBRARY: Action.KERNEL,
    LogKind.COLLECTIVE: Action.COLLECTIVE,
    LogKind.MEMCPY: Action.COPY,
    LogKind.MEMSET: Action.FILL,
    LogKind.EVENT_RECORD: Action.RECORD,
    LogKind.EVENT_WAIT: Action.WAIT,
    LogKind.EVENT_SYNC: Action.HOST_WAITS_EVENT,
    LogKind.STREAM_SYNC: Action.HOST_WAITS_STREAM,
    LogKind.DEVICE_SYNC: Action.HOST_WAITS_DEVICE,
    LogKind.GRAPH_LAUNCH: Action.GRAPH,
    LogKind.GRAPH_NODE: Action.KERNEL,
    LogKind.MALLOC: Action.ALLOCATE,
    LogKind.MAP: Action.ALLOCATE,
    LogKind.FREE: Action.RELEASE,
    LogKind.UNMAP: Action.RELEASE,
}
_BY_CODE: Final = {int(kind): action for kind, action in _ACTIONS.items()}
_GRAPH_NODE: Final = int(LogKind.GRAPH_NODE)
_NODES: Final = {1: Action.COPY, 2: Action.FILL, 3: None, 4: None}
"""What the nodes of a graph do, apart from kernels, by ``enum node_kind``."""


class NativeCalls:
    """A `gpuprobe.torch_support.engine_reports.CallLog`."""

    def __init__(self, runtime: Runtime) -> None:
        # The functions take a fraction of a microsecond, so the interpreter's lock is kept.
        library = ctypes.PyDLL(str(runtime.libraries.core))
        if library.gpn_log_entry_size() != _ENTRY.size:
            raise EnvironmentUnavailable("the simulated GPU's library is of another gpuprobe")
        self.begin: Callable[[int], int] = library.gpn_work_begin
        self.end: Callable[[int], None] = library.gpn_work_end
        self.note: Callable[[int], None] = library.gpn_work_note
        # Without types of arguments, which take as long as the rest of a call: all are numbers.
        library.gpn_work_begin.restype = ctypes.c_uint32
        library.gpn_work_end.restype = library.gpn_work_note.restype = None
        self._start = library.gpn_work_start
        self._start.argtypes = (ctypes.c_size_t,)
        self._start.restype = None
        self._stop = library.gpn_work_stop
        self._stop.restype = None
        self._take = library.gpn_work_take
        self._take.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
        self._take.restype = ctypes.c_size_t
        self._dropped = library.gpn_work_dropped
        self._dropped.restype = ctypes.c_ulonglong
        self._names: dict[int, str] = {}
        self._on = False

    def start(self) -> bool:
        """Log from now on, from nothing; False if another recording's calls are logged."""
        if self._on:
            return False
        self._on = True
        self._start(_MOST)
        return True

    def stop(self) -> None:
        """Log no more."""
        self._on = False
        self._stop()

    def take(self) -> tuple[list[GpuCall], bool]:
        """The calls since the last `take`, in order, and whether none is missing."""
        calls: list[GpuCall] = []
        buffer = ctypes.create_string_buffer(_ENTRY.size * _MANY)
        count = _MANY
        while count == _MANY:
            count = self._take(buffer, _MANY)
            self._append(calls, buffer.raw[: count * _ENTRY.size])
        return calls, not self._dropped()

    def _append(self, calls: list[GpuCall], entries: bytes) -> None:
        for (
            stream, a, size, name, kind, thread, device, x, y, z, peer, batch, operator, captured,
        ) in _ENTRY.iter_unpack(entries):  # fmt: skip
            action = _BY_CODE.get(kind)
            if kind == _GRAPH_NODE:
                action = _NODES.get(a, action)
            if action is None or captured:
                continue
            value, what = size, ""
            group: tuple[int, ...] = ()
            if action is Action.OPERATOR or action is Action.KERNEL:
                pass  # nearly all
            elif action is Action.COLLECTIVE:
                what = self._name(name).removeprefix("nccl")
                group = (x,) if not y else (x, y, z) if not peer else (x, y, z, peer - 1, batch)
            elif action is Action.COPY:
                what = _direction(x, y)
                if kind == LogKind.MEMCPY and self._name(name) == "sync":
                    what += " sync"
            elif action in _EVENTS:
                value = a
            calls.append(
                _new_call(GpuCall, (action, device, stream, operator, value, what, thread, group))
            )

    def _name(self, address: int) -> str:
        """The text at an address of the runtime, which stays there."""
        name = self._names.get(address)
        if name is None:
            name = ctypes.string_at(address).decode(errors="replace") if address else ""
            self._names[address] = name
        return name


_EVENTS: Final = frozenset((Action.RECORD, Action.WAIT, Action.HOST_WAITS_EVENT))
_new_call: Final = tuple.__new__  # a NamedTuple's own is a function in Python


def _direction(to: int, source: int) -> str:
    """The direction of a copy, as a `Work` names it in ``variant``."""
    if to >= 2 and source >= 2:
        return "d2d" if to == source else "peer"
    if to >= 2:
        return "h2d" if source else "pageable h2d"
    if source >= 2:
        return "d2h" if to else "pageable d2h"
    return "h2h"
