"""When the GPU came to each mark: time on the device, by events, and nobody waits for it.

At every mark an event is recorded on the current stream of the current device (about 3 µs of the
host's time). What lies between two events is what the GPU did, or waited, between the same two
places of the program. A step's times are read when its last event is over, at the end of a later
step; the program is never made to wait.

Nothing is recorded, and no event is asked for, while a graph is being captured: CUDA would end the
capture. For the same reason all of this happens in the thread that trains. It is also left out
while somebody listens to torch's event callbacks (a race detector): they would hear ours.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from gpuprobe.model.values import ReadStatus, Unavailable
from gpuprobe.patching import original_of
from gpuprobe.sampler.timeline import PhaseSpan
from gpuprobe.torch_support.process_gpus import takes_time

BEHIND = 4
"""Steps that may wait for the GPU to come to their end. A host that runs further ahead gets its
records without times on the GPU."""

MOST_STREAMS = 64
"""Streams whose objects are kept, by their handles."""

_NOT_OVER = Unavailable("the GPU was too far behind", ReadStatus.NOT_COLLECTED)
_NO_EVENT = Unavailable("no event was recorded here", ReadStatus.NOT_COLLECTED)
_OTHER_STREAM = Unavailable("it started on one stream and ended on another")
_END_TIMEOUT = 2.0  # seconds that the end of a recording waits for the last step

Finish = Callable[[Sequence[int | Unavailable]], None]


class TimingEvent(Protocol):
    """A ``torch.cuda.Event`` with timing. ``stream`` is told apart by its equality."""

    stream: Any

    def record(self) -> None: ...
    def query(self) -> bool: ...
    def elapsed_time(self, end: Any) -> float: ...


class GpuClock:
    """The events of one recorder, and the steps that wait for theirs."""

    def __init__(self, make: Callable[[], TimingEvent], usable: Callable[[], bool]) -> None:
        """``make`` gives a new event; ``usable`` says whether one may be recorded, or asked,
        here and now.
        """
        self._make = make
        self._usable = usable
        self._waiting: deque[tuple[list[PhaseSpan], Finish]] = deque()

    @classmethod
    def of_torch(cls) -> GpuClock | None:
        """The clock of this process's GPU; None where what it does takes no time (a simulated
        one).
        """
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

        def make() -> Any:
            event: Any = Event(enable_timing=True)
            device = torch.cuda.current_device()
            event.stream = (device, torch._C._cuda_getCurrentRawStream(device))
            return event

        def usable() -> bool:
            return (
                torch.cuda.is_initialized()
                and not listeners
                # A check for hazards follows events: what these are asked would count as waits.
                and original_of(torch.cuda.Event.record) is torch.cuda.Event.record
                # An event would make a context on a current device that the program leaves alone.
                and torch._C._cuda_hasPrimaryContext(torch.cuda.current_device())
                and not torch.cuda.is_current_stream_capturing()
            )

        return cls(make, usable)

    def _may(self) -> bool:
        try:
            return self._usable()
        except RuntimeError:  # the GPU is in error: every question to CUDA says so now
            return False

    def mark(self) -> TimingEvent | None:
        """An event, recorded now. None where that is not possible."""
        if not self._may():
            return None
        try:
            event = self._make()
            event.record()
        except RuntimeError:
            return None
        return event

    def when_over(self, spans: list[PhaseSpan], finish: Finish) -> None:
        """Call ``finish`` with the time of each of these spans on the GPU (ns), at once or at
        a later call, in order.
        """
        self._waiting.append((spans, finish))
        self._settle(BEHIND)

    def end(self, sleep: Callable[[float], None] = time.sleep) -> None:
        """No step comes any more. Waits for the GPU, but not for ever."""
        until = time.monotonic() + _END_TIMEOUT
        while self._waiting and time.monotonic() < until:
            self._settle(len(self._waiting))
            if self._waiting:
                sleep(0.005)
        self._settle(0)

    def _settle(self, most: int) -> None:
        """Finish the steps that are over, and those that make it more than ``most``."""
        usable = self._may()
        while self._waiting:
            spans, finish = self._waiting[0]
            over = _over(spans, usable)
            if not over and len(self._waiting) <= most:
                return
            self._waiting.popleft()
            finish([_span(span) if over else _NOT_OVER for span in spans])


def _over(spans: list[PhaseSpan], usable: bool) -> bool:
    """Whether the GPU has come to the end. A GPU in error has: it does nothing any more; and
    where no event was recorded there is none to come to.
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
        return max(0, round(start.elapsed_time(end) * 1e6))  # from ms, in which torch gives it
    except RuntimeError as error:  # the program went on to another device, or the GPU failed
        return Unavailable(f"not timed: {str(error).splitlines()[0]}")
