"""The traces that a screen has open. Knows nothing of Textual."""

from __future__ import annotations

import gc
import threading
from collections import OrderedDict

from gpuprobe.api.live import Share, StepPeak, TraceInspector, TraceRef, open_traces, step_peak
from gpuprobe.errors import GpuprobeError
from gpuprobe.model.io.gc_pause import gc_paused
from gpuprobe.model.run.recording import RankRecording
from gpuprobe.model.values import Unavailable

MOST = 3
"""Steps whose traces are kept. One of a million events takes about 150 MB."""


class OpenTraces:
    """Opens each trace once, for whichever thread asks first; the others wait for it: several
    at once would only take turns.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: OrderedDict[tuple[int, TraceRef], list[TraceInspector]] = OrderedDict()

    def of(self, rank: RankRecording, name: TraceRef) -> list[TraceInspector]:
        """The traces of a step. Raises what `open_traces` raises."""
        key = (rank.session.rank, name)
        with self._lock:
            found = self._open.get(key)
            if found is None:
                with gc_paused():
                    found = self._open[key] = open_traces(rank, name)
                gc.freeze()  # for good: what a trace is made of has no cycles
            self._open.move_to_end(key)
            while len(self._open) > MOST:
                self._open.popitem(last=False)
            return found

    def peak(self, rank: RankRecording, place: int) -> StepPeak | Unavailable:
        """What was alive at the peak of the step at a place in the rank's steps."""
        step = rank.steps[place]
        if not step.traces:
            return step_peak(rank, step)
        try:
            inspectors = self.of(rank, TraceRef(step.index, place))
        except GpuprobeError as error:
            return Unavailable(str(error))
        return peak_of(inspectors[0]) if inspectors else step_peak(rank, step)

    def forget(self) -> None:
        """Read everything anew."""
        with self._lock:
            self._open.clear()


def peak_of(inspector: TraceInspector) -> StepPeak:
    """The memory at the peak of a trace."""
    event = inspector.event(inspector.peak)
    rows = inspector.positions.alive(inspector.peak)

    def shares(grouping: str) -> tuple[Share[str], ...]:
        groups = inspector.grouped(rows, grouping)
        return tuple(Share(group.key, group.bytes, len(group.rows)) for group in groups)

    return StepPeak(
        inspector.device,
        inspector.allocated[inspector.peak],
        event.phase if event is not None else "",
        shares("category"),
        shares("line"),
        shares("module"),
    )
