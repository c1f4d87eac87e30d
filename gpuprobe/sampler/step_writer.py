"""What is done when a step has ended: count, check, and have the record written."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from gpuprobe.model.run.session import KnownTensors, Step
from gpuprobe.model.values import ReadStatus, Unavailable
from gpuprobe.sampler.background import Background
from gpuprobe.sampler.base import AtEnd, Mark, Sink
from gpuprobe.sampler.interruptions import from_program
from gpuprobe.sampler.timeline import PhaseSpan, PhaseTimeline, assemble, counters_rose
from gpuprobe.sampler.tracing.traces import Traces

if TYPE_CHECKING:
    from gpuprobe.sampler.gpu_clock import GpuClock
    from gpuprobe.sampler.sources import DeviceUse, MarkReader

WRITE_TIMEOUT = 30.0
"""Seconds that the end of a recording waits for a disk that is slow to take the last steps."""

_NO_CPU_COUNTERS = Unavailable(
    "torch keeps no allocator statistics on the CPU; level 'trace' counts every storage",
    ReadStatus.NOT_COLLECTED,
)

Write = Callable[[Callable[[], object]], None]


class StepWriter:
    """The ends of one recorder's steps. Made once torch is there."""

    def __init__(
        self,
        sink: Sink,
        write: Write,
        traces: Traces,
        on_fault: Callable[[Exception], None],
    ) -> None:
        """``write`` runs what writes to ``sink``, and survives a full disk."""
        from gpuprobe.sampler.tracing.tensor_sums import TensorSums

        self._sink = sink
        self._write = write
        self._traces = traces
        self._tensor_sums = TensorSums()
        self._background = Background(on_fault)
        self._device_use: DeviceUse | None = None
        self._gpu_clock: GpuClock | None = None
        self._at_end: tuple[int, AtEnd | None] = (-1, None)
        self._so_far: Mark | None = None
        self._one_at_a_time = threading.RLock()
        self._reader: Any = None  # a MarkReader, of CUDA
        self._on_fault = on_fault

    def read_cuda(self, reader: MarkReader) -> bool:
        """There is CUDA: read what it has, and time the GPU at every mark of ``reader``. False
        for a virtual GPU, which takes no time.
        """
        from gpuprobe.sampler.gpu_clock import GpuClock
        from gpuprobe.sampler.sources import CudaCounters, DeviceUse

        reader.sources.append(CudaCounters.of_torch())
        self._reader = reader
        self._device_use = DeviceUse.of_torch()
        self._gpu_clock = GpuClock.of_torch()
        if self._gpu_clock is not None:
            reader.gpu_mark = self._gpu_clock.mark
        return self._gpu_clock is not None

    def write(
        self,
        index: int,
        spans: list[PhaseSpan],
        models: list[Any],
        optimizers: Iterable[Any],
        *,
        earlier_traces: tuple[str, ...] = (),
        out_of_memory: bool = False,
        ended_by: str,
        **record: Any,
    ) -> tuple[str, ...]:
        """Write the step ``index``; the names of its traces. ``record``: what else `assemble`
        is to put into it.
        """
        allocated: dict[str, int | Unavailable] = {
            m.device: m.counts.allocated for m in spans[-1].end.devices
        }
        allocated.setdefault("cpu", _NO_CPU_COUNTERS)
        tensors: tuple[KnownTensors, ...]
        traces = earlier_traces
        if self._traces.on or out_of_memory:
            from gpuprobe.sampler.tracing.tensors import walk

            known = walk(models, optimizers)
            tensors = self._tensor_sums.of_walk(known, allocated)
            traces += self._traces.collect(index, spans, known, out_of_memory=out_of_memory)
        else:
            may_skip = ended_by != "end"
            tensors = self._tensor_sums.take(models, optimizers, allocated, may_skip=may_skip)
        at_end = None
        if self._device_use is not None:
            before, earlier = self._at_end
            # The record that this one replaces had it, of another moment than these counters.
            replaces = before == index and earlier is not None and bool(earlier.used)
            ask = replaces or ended_by == "end"
            at_end = self._device_use.read(tuple(allocated), ask=ask)
            self._at_end = (index, at_end)
        more: dict[str, Any] = {
            "tensors": tensors,
            "traces": traces,
            "ended_by": ended_by,
            "at_end": at_end,
        }

        def make(spans: list[PhaseSpan], **timed: Any) -> Step:
            return assemble(index, spans, **more, **record, **timed)

        if self._traces.cpu is not None:  # it may be wanted once more (`Traces.write_waiting`)
            step = make(spans)
            self._write(lambda: self._sink.step(step))
            self._traces.step_written(step)
        elif self._gpu_clock is not None:
            # Without their events: those are given back here, by the thread that trains.
            bare = [PhaseSpan(s.path, _bare(s.start), _bare(s.end)) for s in spans]
            later = functools.partial(make, bare)
            self._gpu_clock.when_over(spans, lambda times: self._later(later, gpu_ns=times))
        else:
            self._later(functools.partial(make, spans))
        return traces

    def write_so_far(self, index: int, timeline: PhaseTimeline) -> None:
        """Write the step ``index``, which is not over, if a peak rose since the last time. Its own
        record replaces that. Of programs that use a GPU.
        """
        try:
            with self._one_at_a_time:  # what another thread writes is there when this returns
                now = self._reader.without_event()
                spans = timeline.so_far(now)
                if counters_rose(self._so_far or spans[0].start, now):
                    self._so_far = now
                    step = assemble(index, spans, origin_ns=timeline.started_ns, ended_by="end")
                    self._write(lambda: self._sink.step(step))
        except Exception as error:
            if from_program(error):
                raise
            self._on_fault(error)

    def _later(self, make: Callable[..., Step], **more: Any) -> None:
        self._background.submit(lambda: self._write(lambda: self._sink.step(make(**more))))

    def finish(self) -> list[str]:
        """Have all written that waits; what went wrong, as text. Never raises."""
        faults = []
        try:
            if self._gpu_clock is not None:
                self._gpu_clock.end()
        except Exception as error:  # the end of a recording ends no program
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
