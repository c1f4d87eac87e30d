"""The launches of this process, counted by the runtime (``runtime/launches.c``)."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, Final

from gpuprobe.errors import EnvironmentUnavailable
from gpuprobe.model.run.launches import LaunchedKernel, LaunchKind
from gpuprobe.native.names import readable
from gpuprobe.native.process import LogKind, Runtime

_KINDS: Final = {
    LogKind.LAUNCH: LaunchKind.KERNEL,
    LogKind.LIBRARY: LaunchKind.LIBRARY,
    LogKind.COLLECTIVE: LaunchKind.COLLECTIVE,
    LogKind.GRAPH_LAUNCH: LaunchKind.GRAPH,
}


class _Row(ctypes.Structure):
    _fields_ = (
        ("count", ctypes.c_uint64),
        ("name", ctypes.c_char_p),
        ("kind", ctypes.c_uint32),
        ("device", ctypes.c_int32),
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("shared", ctypes.c_uint32),
        ("captured", ctypes.c_uint32),
        ("nodes", ctypes.c_uint32),
        ("multiprocessors", ctypes.c_uint32),
        ("place", ctypes.c_uint32),
        ("phase", ctypes.c_uint32),
    )


_KEY: Final = slice(_Row.name.offset, _Row.place.offset)
"""The bytes of a row that are the kernel's."""


class NativeLaunches:
    """A `gpuprobe.torch_support.engine_reports.LaunchCounter`."""

    def __init__(self, runtime: Runtime) -> None:
        # The functions take a fraction of a microsecond, so the interpreter's lock is kept.
        library = ctypes.PyDLL(str(runtime.libraries.core))
        if library.gpn_launches_row_size() != ctypes.sizeof(_Row):
            raise EnvironmentUnavailable("the simulated GPU's library is of another gpuprobe")
        self.set_place: Callable[[int], int] = library.gpn_launches_place
        """Sets the place of what this thread launches and returns the one before."""
        self._count = library.gpn_launches_count
        self._count.argtypes = (ctypes.c_bool,)
        self._count.restype = None
        self._phase = library.gpn_launches_phase
        self._phase.restype = None
        self._take = library.gpn_launches_take
        self._take.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
        self._take.restype = ctypes.c_size_t
        self.here: Callable[[], int] | None = None
        self._computing: Any = None
        self._kernels: dict[bytes, LaunchedKernel] = {}

    def follow(self, computing: Any) -> None:
        """Note the place of each operator that ``computing`` (`Computing`) runs; None: of none."""
        if self._computing is not None:
            self._computing.launches = None
        self._computing = computing
        self._apply()

    def _apply(self) -> None:
        if self._computing is not None:
            self._computing.launches = None if self.here is None else (self.here, self.set_place)

    def start(self, here: Callable[[], int]) -> bool:
        """Count from now on; False if another recording's launches are counted."""
        if self.here is not None:
            return False
        self.here = here
        self._count(True)
        self._apply()
        return True

    def stop(self) -> None:
        """Count no more."""
        self.here = None
        self._apply()
        self._count(False)

    def phase(self, number: int) -> None:
        """The phase of what is launched from now on."""
        self._phase(number)

    def take(self) -> list[tuple[LaunchedKernel, int, int, int]]:
        """Kernel, place, phase and count of what was launched since the last time."""
        room = 1024
        while True:
            rows = (_Row * room)()
            count = self._take(ctypes.byref(rows), room)
            if count <= room:
                return [
                    (self._kernel(row), row.place, row.phase, row.count) for row in rows[:count]
                ]
            room = 2 * count  # meanwhile other threads launch more

    def _kernel(self, row: _Row) -> LaunchedKernel:
        key = bytes(row)[_KEY]
        found = self._kernels.get(key)
        if found is None:
            found = self._kernels[key] = _kernel(row)
        return found


def _kernel(row: _Row) -> LaunchedKernel:
    kind = _KINDS[LogKind(row.kind)]
    known = kind is LaunchKind.KERNEL
    return LaunchedKernel(
        name=readable((row.name or b"").decode(errors="replace")),
        kind=kind,
        device=f"cuda:{row.device}",
        grid=tuple(row.grid) if known else (),
        block=tuple(row.block) if known else (),
        shared=row.shared,
        multiprocessors=row.multiprocessors,
        nodes=row.nodes,
        captured=bool(row.captured),
    )
