"""Processes that an estimated program starts: their memory, and their end.

Each process has its own CUDA context and allocator on the GPUs that it uses, and leaves a file with
the peaks of its simulated GPUs and what was assumed about its values. The module does not import
torch: `ProcessRecorder` is unpickled in processes that have not imported it yet.
"""

from __future__ import annotations

import contextlib
import json
import math
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from gpuprobe.model.io.files import atomic_write
from gpuprobe.model.values import Bytes
from gpuprobe.sampler.hooks.optimizer_steps import Enough

if TYPE_CHECKING:
    from gpuprobe.catalogue.gpu_model import GpuModel
    from gpuprobe.native.session import NativeSession

ENDED: Final = ".ended"
"""The suffix of the file that a process leaves when it is ended after its steps."""

_UNCERTAINTY: Final = 0.02
"""Of the reserved memory, in both directions, as for the ranks of a job: the reuse of blocks
depends on addresses, and the processes' allocations are not simulated in several orders."""


class ProcessRecorder(NamedTuple):
    """A `StartInProcess` of `gpuprobe.sampler.processes.children`, which records the peaks of
    each process in ``folder``. After ``steps`` optimizer steps a process ends, as by
    ``sys.exit(0)``.
    """

    folder: Path
    steps: int

    def __call__(self, since: float) -> _ProcessPeaks | None:
        from gpuprobe.native.session import current
        from gpuprobe.sampler.hooks.optimizer_steps import exit_after

        session = current()
        if session is None:
            return None
        exit_after(self.steps, self._ended)
        return _ProcessPeaks(session, self.folder, min(since, _started()))

    def _ended(self) -> None:
        with contextlib.suppress(OSError):  # as in `_ProcessPeaks`
            (self.folder / f"{os.getpid()}{ENDED}").touch()


def _started() -> float:
    """When this process was started, on the clock of `time.monotonic`, rounded up to the ticks of
    ``/proc/self/stat`` (field 22, proc(5)).

    Not the time of this call: importing torch may take longer than the steps of another process,
    and the two would seem to have run one after the other.
    """
    fields = Path("/proc/self/stat").read_text(encoding="ascii", errors="replace")
    ticks = int(fields.rpartition(")")[2].split()[19])
    started = (ticks + 1) / os.sysconf("SC_CLK_TCK")
    return time.monotonic() - (time.clock_gettime(time.CLOCK_BOOTTIME) - started)


class _ProcessPeaks:
    """Writes the peaks of this process's simulated GPUs to its file."""

    def __init__(self, session: NativeSession, folder: Path, since: float) -> None:
        self._session = session
        self._file = folder / f"{os.getpid()}.json"
        self._since = since
        self._written: dict[str, object] = {}

    def so_far(self) -> None:
        use = self._use()
        if use != self._written:
            self._write(use, None)

    def end(self, error: BaseException | None) -> None:
        self._write(self._use(), time.monotonic())

    def _use(self) -> dict[str, object]:
        session = self._session
        return {
            "devices": {number: [*peaks] for number, peaks in session.peaks().items()},
            "assumed": [*session.assumed, *session.models],
            "unknown_read": [*session.unknown_read()],
        }

    def _write(self, use: dict[str, object], until: float | None) -> None:
        self._written = use
        document = {"since": self._since, "until": until, **use}
        # An error means that the estimate is over and its folder removed.
        with contextlib.suppress(OSError), atomic_write(self._file) as file:
            file.write(json.dumps(document).encode())


class OtherProcesses(NamedTuple):
    """The other processes on one GPU at the time when they need the most: their number, and the
    range of their memory in bytes, with their contexts.
    """

    processes: int
    low: Bytes
    high: Bytes


NO_PROCESSES: Final = OtherProcesses(0, Bytes(0), Bytes(0))


class StartedProcesses(NamedTuple):
    """The processes that the program started: how many ``used`` a GPU, and their needs by the GPU's
    index. ``assumed`` and ``unknown_reads``: `NativeSession.assumed` and the results of
    `NativeSession.unknown_read` of all of them.
    """

    used: int
    needs: dict[int, OtherProcesses]
    assumed: tuple[str, ...]
    unknown_reads: tuple[tuple[str, str], ...]


class _Use(NamedTuple):
    since: float
    until: float
    reserved: int


def started_processes(folder: Path, models: Mapping[int, GpuModel]) -> StartedProcesses:
    """The processes that left a file in ``folder``."""
    uses: dict[int, list[_Use]] = {}
    processes = 0
    assumed: dict[str, None] = {}
    reads: list[tuple[str, str]] = []
    for file in sorted(folder.glob("*.json")):
        use = json.loads(file.read_bytes())
        until = float("inf") if use["until"] is None else use["until"]
        processes += bool(use["devices"])
        assumed |= dict.fromkeys(use["assumed"])
        reads.append(tuple(use["unknown_read"]))
        for number, (_, reserved) in use["devices"].items():
            uses.setdefault(int(number), []).append(_Use(use["since"], until, reserved))
    needs = {}
    for number, of_gpu in uses.items():
        together = _most_at_once(of_gpu)
        reserved = sum(use.reserved for use in together)
        model = models[number]
        needs[number] = OtherProcesses(
            len(together),
            Bytes(int(reserved * (1 - _UNCERTAINTY)) + len(together) * model.context_low),
            Bytes(int(reserved * (1 + _UNCERTAINTY)) + len(together) * model.context_high),
        )
    return StartedProcesses(processes, needs, tuple(assumed), tuple(reads))


def _most_at_once(uses: Sequence[_Use]) -> list[_Use]:
    """The processes that together reserve the most. The sum only grows when one starts, so only
    these times are compared.
    """

    def at(instant: float) -> list[_Use]:
        return [use for use in uses if use.since <= instant < use.until]

    return max(
        (at(use.since) for use in uses), key=lambda found: sum(use.reserved for use in found)
    )


def assumption_text(processes: int) -> str:
    """The assumption of an estimate about the processes, as a sentence."""
    started = "1 process that uses" if processes == 1 else f"{processes} processes that use"
    return (
        f"{started} the GPU, started by the program: that they need the most when the program "
        "does, and at once if they were alive at the same time in this simulation"
    )


_PATIENCE_S: Final = 5.0
_IDLE_S: Final = 0.2
"""CPU time of the program and its processes within `_PATIENCE_S`: with less, it is stalled."""


class Stalled(Enough):
    """Ends a program that waits for a process which was ended after its steps."""


class TimeIsOver(Enough):
    """Ends a program after the time that it may take."""


@contextmanager
def interrupted(folder: Path, limit: float = 0.0) -> Iterator[None]:
    """Raise `TimeIsOver` in the program after ``limit`` seconds (0: never), and `Stalled` if it and
    its processes are idle for a few seconds after one of them was ended (``folder`` has its file):
    it may be waiting for that process. If `Enough` ends the program, its processes end too.
    """
    main = threading.main_thread()
    if threading.current_thread() is not main or not hasattr(signal, "pthread_kill"):
        yield
        return

    deadline = time.monotonic() + limit if limit else math.inf

    def interrupt(number: int, frame: object) -> None:
        raise TimeIsOver if time.monotonic() >= deadline else Stalled

    others = {process.pid for process in multiprocessing.active_children()}
    over = threading.Event()
    # SIGURG is ignored by default, so a late one does no harm.
    handler = signal.signal(signal.SIGURG, interrupt)
    thread = threading.Thread(
        target=_watch_processes,
        args=(folder, _PATIENCE_S, over, main.ident, deadline),
        name="gpuprobe-interrupts",
        daemon=True,
    )
    thread.start()
    try:
        yield
    except Enough:
        for process in multiprocessing.active_children():
            if process.pid not in others:
                process.terminate()
        raise
    finally:
        over.set()
        thread.join()
        signal.signal(signal.SIGURG, handler)


def _watch_processes(
    folder: Path, patience: float, over: threading.Event, main: int, deadline: float
) -> None:
    used, since = 0.0, time.monotonic()
    while not over.wait(patience / 5):
        if time.monotonic() >= deadline:
            signal.pthread_kill(main, signal.SIGURG)
            continue
        now = _processor_time()
        if now - used > _IDLE_S or not any(folder.glob(f"*{ENDED}")):
            used, since = now, time.monotonic()
        elif time.monotonic() - since >= patience:
            signal.pthread_kill(main, signal.SIGURG)
            since = time.monotonic()


def _processor_time() -> float:
    """CPU seconds of this process, without the calling thread, and of the processes it started."""
    import psutil  # 20 ms, in each process that the program starts

    total = time.process_time() - time.thread_time()
    for process in psutil.Process().children(recursive=True):
        try:
            times = process.cpu_times()
        except psutil.Error:  # it has ended
            continue
        total += times.user + times.system
    return total
