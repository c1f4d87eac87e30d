"""The end of a step: its record is put together, and written by a thread in the background.

The training thread passes on what it has read and continues. A slow disk then slows nothing down,
and the bookkeeping runs during operators, which release the interpreter lock.
"""

from __future__ import annotations

import _thread
import atexit
import functools
import os
import signal
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from gpuprobe.clocks import monotonic
from gpuprobe.model.run.session import KnownTensors, Step
from gpuprobe.model.values import ReadStatus, Unavailable
from gpuprobe.sampler.base import AtEnd, Mark, Sink
from gpuprobe.sampler.failures import Failures, from_program
from gpuprobe.sampler.timeline import PhaseSpan, PhaseTimeline, assemble, counters_rose
from gpuprobe.sampler.tracing.traces import Traces

if TYPE_CHECKING:
    from torch.nn import Module
    from torch.optim import Optimizer

    from gpuprobe.sampler.gpu_clock import GpuClock
    from gpuprobe.sampler.sources import DeviceUse, MarkReader

LIMIT = 10_000
"""Tasks that may wait. A disk that accepts nothing must not fill the memory."""

PAUSE = 0.25
"""Seconds between two rounds of work. The program's operators empty the processor's caches: the
tasks of short steps are done together, in a third of the time. A step longer than this is written
at once; of shorter ones, a program that is killed loses this much."""

FORK_TIMEOUT = 5.0
"""Seconds that a fork, and the interpreter's end, wait for the thread. Continuing without it is the
lesser evil."""


_FAULTS = {
    getattr(signal, name)
    for name in ("SIGSEGV", "SIGBUS", "SIGFPE", "SIGILL", "SIGABRT")
    if hasattr(signal, name)
}
"""Signals that a thread gets for what it does itself. SIGXFSZ is not among them: if it is blocked,
a write beyond the limit of a file's size fails, and does not end the process."""


class Background:
    """Runs tasks in order, in a thread. The thread starts with the first task, and ends when there
    was none for `PAUSE` and before a fork: a child has no second thread, and Python warns of
    forking with one. If no thread can be started, tasks run at once.

    It is not one of the program's: ``threading.enumerate`` lacks it, the end of the interpreter
    does not wait for it, and it gets no signals, which the program may have blocked.
    """

    def __init__(self, on_error: Callable[[Exception], None]) -> None:
        """``on_error`` gets what a task raises, in the thread."""
        self._on_error = on_error
        self._forget()
        self.refused = 0
        """Tasks that were refused, because `LIMIT` were waiting."""
        _follow_process(self)

    def _forget(self) -> None:
        """Start with no tasks and no thread: at first, and in a forked child."""
        # Reentrant: a signal handler that ends the recording may interrupt `submit`.
        self._changed = threading.Condition(threading.RLock())
        self._waiting: deque[Callable[[], object]] = deque()
        self._thread: int | None = None  # its identifier; 0 while it starts
        self._ending = False
        self._abandoned = False
        self._pausing = False
        """Whether the thread wakes up on its own: it does not have to be notified."""

    def submit(self, work: Callable[[], object]) -> None:
        """Run ``work`` soon. Never raises."""
        with self._changed:
            if self._abandoned or len(self._waiting) >= LIMIT:
                self.refused += 1
                return
            self._waiting.append(work)
            if not self._pausing:
                self._changed.notify_all()
            has_thread = self._has_thread()
        if not has_thread:
            self._run_tasks()

    def drain(self, timeout: float) -> bool:
        """Wait until all tasks are done, and end the thread. ``timeout`` in seconds; False if it
        took longer, or if a task called this: it cannot wait for itself. Never raises.
        """
        with self._changed:
            if self._thread == threading.get_ident():
                return False
            self._ending = True
            self._changed.notify_all()
            until = monotonic() + timeout
            while self._thread is not None and (left := until - monotonic()) > 0:
                self._changed.wait(left)
            self._ending = False
            return self._thread is None

    def abandon(self) -> int:
        """Run nothing more after the current task; the number of tasks that are never run."""
        with self._changed:
            self._abandoned = True
            left = len(self._waiting) + (self._thread is not None)
            self._waiting.clear()
            return left

    def _has_thread(self) -> bool:
        """Start a thread unless there is one. False if the system, or an interpreter at its end,
        allows none.
        """
        if self._thread is None:
            self._thread = 0
            try:
                with _signals_blocked():
                    _thread.start_new_thread(self._run, ())
            except RuntimeError:
                self._thread = None
                return False
        return True

    def _run(self) -> None:
        with self._changed:
            self._thread = threading.get_ident()
        done = -PAUSE
        while True:
            with self._changed:
                self._pause(done + PAUSE)
                if not self._waiting:
                    self._thread = None
                    self._changed.notify_all()
                    return
            self._run_tasks()
            done = monotonic()

    def _pause(self, until: float) -> None:
        """Wait until this time of the monotonic clock, or the end. Holds ``_changed``."""
        self._pausing = True
        while not self._ending and (left := until - monotonic()) > 0:
            self._changed.wait(left)
        self._pausing = False

    def _run_tasks(self) -> None:
        while True:
            with self._changed:
                if not self._waiting:
                    return
                work = self._waiting.popleft()
            self._run_task(work)

    def _run_task(self, work: Callable[[], object]) -> None:
        try:
            work()
        except Exception as error:  # noqa: BLE001 - on_error decides
            if not self._abandoned:  # afterwards the recording is closed, and the failure is known
                self._on_error(error)


@contextmanager
def _signals_blocked() -> Iterator[None]:
    """A thread that is started inside gets no signal that another one could get. Faults remain:
    they are a thread's own.
    """
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals() - _FAULTS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _follow_process(background: Background) -> None:
    """End the thread before a fork and at the interpreter's end; start again in a child."""

    # No `weakref.finalize`: without its own function at the exit, if the program has cleared those,
    # it fails in the interpreter's teardown.
    def gone(_: object, unregister: Callable[..., object] = atexit.unregister) -> None:
        unregister(end)

    ref = weakref.ref(background, gone)

    def end() -> None:
        living = ref()
        if living is not None:
            living.drain(FORK_TIMEOUT)

    def reset() -> None:
        living = ref()
        if living is not None:
            living._forget()

    if hasattr(os, "register_at_fork"):  # not on Windows
        os.register_at_fork(before=end, after_in_child=reset)
    atexit.register(end)


WRITE_TIMEOUT = 30.0
"""Seconds that the end of a recording waits for a slow disk to accept the last steps."""

_NO_CPU_COUNTERS = Unavailable(
    "torch keeps no allocator statistics on the CPU; level 'trace' counts every storage",
    ReadStatus.NOT_COLLECTED,
)


class StepWriter:
    """Writes the records of one recorder's steps. Created once torch is imported."""

    def __init__(
        self,
        sink: Sink,
        failures: Failures,
        traces: Traces,
        on_fault: Callable[[Exception], None],
    ) -> None:
        """``failures``: what a full disk means for what is written to ``sink``."""
        from gpuprobe.sampler.tracing.tensors import RepeatedWalk, TensorSums

        self._sink = sink
        self._failures = failures
        self._traces = traces
        self._tensor_sums = TensorSums()
        self._walk = RepeatedWalk().take
        self._background = Background(on_fault)
        self._device_use: DeviceUse | None = None
        self._gpu_clock: GpuClock | None = None
        self._at_end: tuple[int, AtEnd | None] = (-1, None)
        self._so_far: Mark | None = None
        self._one_at_a_time = threading.RLock()
        self._reader: MarkReader | None = None  # with CUDA
        self._on_fault = on_fault

    def read_cuda(self, reader: MarkReader) -> bool:
        """Read CUDA's counters, and time the GPU, at every mark of ``reader``. False for a
        simulated GPU, whose work takes no time.
        """
        from gpuprobe.sampler.gpu_clock import GpuClock
        from gpuprobe.sampler.sources import CudaCounters, DeviceUse

        reader.sources.append(CudaCounters.of_torch())
        self._reader = reader
        self._gpu_clock = GpuClock.of_torch()
        self._device_use = DeviceUse.of_torch(clocks=self._gpu_clock is not None)
        if self._gpu_clock is not None:
            reader.gpu_mark = self._gpu_clock.mark
        return self._gpu_clock is not None

    def write(
        self,
        index: int,
        spans: list[PhaseSpan],
        models: list[Module],
        optimizers: Iterable[Optimizer],
        *,
        earlier_traces: tuple[str, ...] = (),
        out_of_memory: bool = False,
        ended_by: str,
        **record: Any,
    ) -> tuple[str, ...]:
        """Write the step ``index``; returns the names of its traces. ``record``: further arguments
        of `assemble`.
        """
        allocated: dict[str, int | Unavailable] = {
            m.device: m.counts.allocated for m in spans[-1].end.devices
        }
        allocated.setdefault("cpu", _NO_CPU_COUNTERS)
        tensors: tuple[KnownTensors, ...]
        traces = earlier_traces
        if self._traces.on or out_of_memory:
            from gpuprobe.sampler.tracing.tensors import walk

            # On the CPU the keys count, too.
            known = (walk if self._traces.cpu is not None else self._walk)(models, optimizers)
            tensors = self._tensor_sums.of_walk(known, allocated)
            traces += self._traces.collect(index, spans, known, out_of_memory=out_of_memory)
        else:
            may_skip = ended_by != "end"
            tensors = self._tensor_sums.take(models, optimizers, allocated, may_skip=may_skip)
        at_end = None
        if self._device_use is not None:
            before, earlier = self._at_end
            # The record that this one replaces had the reading, of another moment than these
            # counters.
            replaces = before == index and earlier is not None and bool(earlier.used)
            query = replaces or ended_by == "end"
            at_end = self._device_use.read(tuple(allocated), query=query)
            self._at_end = (index, at_end)
        more: dict[str, Any] = {
            "tensors": tensors,
            "traces": traces,
            "ended_by": ended_by,
            "at_end": at_end,
        }

        def make(spans: list[PhaseSpan], **timed: Any) -> Step:
            return assemble(index, spans, **more, **record, **timed)

        if self._traces.cpu is not None:  # it may be written again (`Traces.write_waiting`)
            step = make(spans)
            with self._failures:
                self._sink.step(step)
            self._traces.step_written(step)
        elif self._gpu_clock is not None:
            # Without the events: those are released here, by the thread that trains.
            bare = [PhaseSpan(s.path, _bare(s.start), _bare(s.end)) for s in spans]
            later = functools.partial(make, bare)
            self._gpu_clock.when_over(spans, lambda times: self._later(later, gpu_ns=times))
        else:
            self._later(functools.partial(make, spans))
        return traces

    def write_so_far(self, index: int, timeline: PhaseTimeline) -> None:
        """Write the step ``index``, which has not ended, if a peak rose since the last time. Its
        final record replaces this one. Only for programs that use a GPU.
        """
        try:
            with self._one_at_a_time:  # what another thread writes is written when this returns
                assert self._reader is not None
                now = self._reader.without_event()
                spans = timeline.so_far(now)
                if counters_rose(self._so_far or spans[0].start, now):
                    self._so_far = now
                    step = assemble(index, spans, origin_ns=timeline.started_ns, ended_by="end")
                    with self._failures:
                        self._sink.step(step)
        except Exception as error:
            if from_program(error):
                raise
            self._on_fault(error)

    def _later(self, make: Callable[..., Step], **more: Any) -> None:
        def write() -> None:
            with self._failures:
                self._sink.step(make(**more))

        self._background.submit(write)

    def finish(self) -> list[str]:
        """Write everything that waits; returns what went wrong, as text. Never raises."""
        faults = []
        try:
            if self._gpu_clock is not None:
                self._gpu_clock.end()
        except Exception as error:  # it must not end the program
            if from_program(error):
                raise
            faults.append(f"{type(error).__name__}: {error}")
        missing = 0
        if not self._background.drain(WRITE_TIMEOUT):
            missing = self._background.abandon()
            faults.append(f"steps were not written within {WRITE_TIMEOUT:.0f} s")
        missing += self._background.refused
        if missing:
            faults.append(f"{missing} steps are missing: writing them took too long")
        return faults


def _bare(mark: Mark) -> Mark:
    return mark if mark.gpu is None else mark._replace(gpu=None)
