"""The time on the GPU between marks, from events, without waiting for it.

At every mark an event is recorded on the current stream of the current device (about 3 µs of the
host's time). The time between two events is what the GPU worked, or waited, between the same two
places of the program. A step's times are read when its last event has completed, at the end of a
later step; the program never waits.

While a graph is being captured, nothing is recorded and no event is queried: CUDA would end the
capture. For the same reason all of this happens in the thread that trains. It is also left out
while torch's event callbacks have a listener (a race detector): it would receive our events.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from gpuprobe.clocks import monotonic, sleep
from gpuprobe.model.values import ReadStatus, Unavailable
from gpuprobe.patching import original_of
from gpuprobe.sampler.base import TimingEvent
from gpuprobe.sampler.timeline import PhaseSpan
from gpuprobe.torch_support.process_gpus import takes_time

BEHIND = 4
"""Steps that may wait for the GPU to finish them. A host that runs further ahead gets records
without times on the GPU."""

MOST_STREAMS = 64
"""Streams whose objects are cached, by their handles."""

_NOT_COMPLETED = Unavailable("the GPU was too far behind", ReadStatus.NOT_COLLECTED)
_NO_EVENT = Unavailable("no event was recorded here", ReadStatus.NOT_COLLECTED)
_OTHER_STREAM = Unavailable("it started on one stream and ended on another")
_END_TIMEOUT = 2.0  # seconds that the end of a recording waits for the last step

Finish = Callable[[Sequence[int | Unavailable]], None]


class GpuClock:
    """The events of one recorder, and the steps that wait for theirs."""

    def __init__(self, make: Callable[[], TimingEvent], usable: Callable[[], bool]) -> None:
        """``make`` returns a new event; ``usable`` whether one may be recorded or queried here and
        now.
        """
        self._make = make
        self._usable = usable
        self._waiting: deque[tuple[list[PhaseSpan], Finish]] = deque()

    @classmethod
    def of_torch(cls) -> GpuClock | None:
        """The clock of this process's GPU; None if its work takes no time (a simulated GPU)."""
        import torch
        from torch.cuda import _gpu_trace

        on_cuda = issubclass(torch.cuda.Event, getattr(torch._C, "_CudaEventBase", ()))
        if not on_cuda or not takes_time():
            return None
        listeners = _gpu_trace.EventRecordCallbacks.callback_list

        streams: dict[tuple[int, int], Any] = {}

        class Event(torch.cuda.Event):
            """An event, and the stream that it is recorded on."""

            def record(self) -> None:
                # torch.cuda.current_stream() takes longer than all else here.
                found = streams.get(self.stream)
                if found is None:
                    if len(streams) >= MOST_STREAMS:
                        streams.clear()
                    found = streams[self.stream] = torch.cuda.current_stream()
                super().record(found)

        def make() -> TimingEvent:
            event: TimingEvent = Event(enable_timing=True)
            device = torch.cuda.current_device()
            event.stream = (device, torch._C._cuda_getCurrentRawStream(device))
            return event

        def usable() -> bool:
            return (
                torch.cuda.is_initialized()
                and not listeners
                # A hazard check records calls of events: queries of ours would count as waits.
                and original_of(torch.cuda.Event.record) is torch.cuda.Event.record
                # An event would create a context on a current device that the program does not use.
                and torch._C._cuda_hasPrimaryContext(torch.cuda.current_device())
                and not torch.cuda.is_current_stream_capturing()
            )

        return cls(make, usable)

    def _may_use(self) -> bool:
        try:
            return self._usable()
        except RuntimeError:  # the GPU is in error: every call of CUDA now raises that
            return False

    def mark(self) -> TimingEvent | None:
        """An event that is recorded now; None if that is not possible."""
        if not self._may_use():
            return None
        try:
            event = self._make()
            event.record()
        except RuntimeError:
            return None
        return event

    def when_over(self, spans: list[PhaseSpan], finish: Finish) -> None:
        """Call ``finish`` with the time of each span on the GPU (ns), at once or at a later call,
        in order.
        """
        self._waiting.append((spans, finish))
        self._finish_steps(BEHIND)

    def end(self, sleep: Callable[[float], None] = sleep) -> None:
        """End the last steps. Waits for the GPU, at most `_END_TIMEOUT`."""
        until = monotonic() + _END_TIMEOUT
        while self._waiting and monotonic() < until:
            self._finish_steps(len(self._waiting))
            if self._waiting:
                sleep(0.005)
        self._finish_steps(0)

    def _finish_steps(self, most: int) -> None:
        """Finish the steps that have completed, and those beyond ``most``."""
        usable = self._may_use()
        while self._waiting:
            spans, finish = self._waiting[0]
            completed = _completed(spans, usable)
            if not completed and len(self._waiting) <= most:
                return
            self._waiting.popleft()
            finish([_span(span) if completed else _NOT_COMPLETED for span in spans])


def _completed(spans: list[PhaseSpan], usable: bool) -> bool:
    """Whether the GPU has completed the spans. A GPU in error has: it does nothing any more; and
    without an event there is none to wait for.
    """
    for span in reversed(spans):
        if span.end.gpu is not None:
            try:
                return usable and bool(span.end.gpu.query())
            except RuntimeError:
                return True
    return True


def _span(span: PhaseSpan) -> int | Unavailable:
    start, end = span.start.gpu, span.end.gpu
    if start is None or end is None:
        return _NO_EVENT
    if start.stream != end.stream:
        return _OTHER_STREAM
    try:
        return max(0, round(start.elapsed_time(end) * 1e6))  # torch returns ms
    except RuntimeError as error:  # the program changed to another device, or the GPU failed
        return Unavailable(f"not timed: {str(error).splitlines()[0]}")
