"""Worker threads of a recording's screen: they read the recording, a step's peak, traces, and what
else runs on the GPU. Results arrive as messages.
"""

from __future__ import annotations

import gc
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from textual.message import Message
from textual.worker import Worker, get_current_worker

from gpuprobe.analysis.inspection.steps import Insight, StepPeak, insight, step_peak
from gpuprobe.analysis.inspection.trace import TraceInspector, TraceRef, open_traces, trace_refs
from gpuprobe.analysis.peak.peaks import Share
from gpuprobe.api.live import neighbours, out_of_memory
from gpuprobe.errors import GpuprobeError
from gpuprobe.model.causes import MemoryCause
from gpuprobe.model.io.files import gc_paused
from gpuprobe.model.machine.process import Neighbours
from gpuprobe.model.run.recording import RankRecording, Recording
from gpuprobe.model.values import Unavailable
from gpuprobe.recording.load import Followed
from gpuprobe.reporters.sections.watch import Surroundings
from gpuprobe.tui.viewer.run_model import Curves, RunModel, model_of

_QUERY_EVERY = 5.0
"""Seconds between queries of the driver for the processes that share the GPU."""

_SHARE = 5
"""Reading the recording takes at most a fifth of the time: longer reads are less frequent."""


@dataclass
class Polled(Message):
    """The recording as it is now, and the model of its selected rank."""

    recording: Recording
    model: RunModel


@dataclass
class ReadFailed(Message):
    """The recording could not be read. ``nothing_shown``: no read has succeeded before."""

    error: GpuprobeError
    nothing_shown: bool


@dataclass
class PeakRead(Message):
    """The memory at the peak of a step. ``key``: the rank, and the step's index."""

    key: tuple[int, int]
    peak: StepPeak | Unavailable


@dataclass
class SurroundingsRead(Message):
    """What was found around a rank: other processes on its GPU, its forecast, its traces."""

    rank: int
    surroundings: Surroundings


@dataclass
class CausesRead(Message):
    """The causes of the memory at the highest peak, as `gpuprobe report` names them."""

    causes: tuple[MemoryCause, ...] | Unavailable


def follow(
    followed: Followed,
    selected_rank: Callable[[], int],
    interval: float,
    post: Callable[[Message], object],
    *,
    fresh: bool,
) -> None:
    """Poll the recording until every rank has ended, a read fails or the worker is cancelled.
    ``fresh``: nothing is shown yet.
    """
    worker = get_current_worker()
    curves: dict[int, Curves] = {}
    while not worker.is_cancelled:
        began = time.monotonic()
        try:
            recording = followed.poll()
        except GpuprobeError as error:
            post(ReadFailed(error, fresh))
            return
        fresh = False
        rank = selected_rank()
        model = model_of(recording, rank, curves.setdefault(rank, Curves()))
        post(Polled(recording, model))
        others = [at for at in range(len(recording.ranks)) if at != rank]
        running = model.running or any(model_of(recording, at).running for at in others)
        if recording.ranks and not running:
            return
        _wait(worker, max(interval, _SHARE * (time.monotonic() - began)))


@dataclass(frozen=True, slots=True)
class ShownRank:
    """The rank on the screen: its position in the recording, and its device."""

    rank: RankRecording
    position: int
    device: str


def read_surroundings(
    shown: Callable[[], ShownRank | None],
    interval: float,
    post: Callable[[Message], object],
    demo: str | None,
) -> None:
    """Query the driver, and analyse trend and traces, for the rank that is ``shown``; again when it
    has new steps, until the worker is cancelled. Does nothing while ``shown`` returns None.
    """
    worker = get_current_worker()
    last_state: object = None
    last_insight: tuple[object, Insight | Unavailable | None] = (None, None)
    while not worker.is_cancelled:
        now = shown()
        state = now and (now.position, len(now.rank.steps), now.rank.end)
        if now is None or state == last_state:
            _wait(worker, min(0.05 if now is None else 0.2, interval))
            continue
        last_state = state
        rank, position, device = now.rank, now.position, now.device
        others: Neighbours | Unavailable
        try:
            others = neighbours(rank, device, demo)
        except GpuprobeError as error:
            others = Unavailable(str(error))
        forecast = out_of_memory(rank, device, others)
        traced = (position, trace_refs(rank)[-1:])
        known = last_insight[1] if last_insight[0] == traced else None
        post(SurroundingsRead(position, Surroundings(others, forecast, known)))
        if known is None:
            last_insight = (traced, insight(rank, device))
            post(SurroundingsRead(position, Surroundings(others, forecast, last_insight[1])))
        _wait(worker, max(interval, min(_QUERY_EVERY, 10 * interval)))


def _wait(worker: Worker[object], seconds: float) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until and not worker.is_cancelled:
        time.sleep(min(0.05, seconds))


def read_causes(recording: Recording, post: Callable[[Message], object]) -> None:
    """Find the causes in the recording as it is; the next time later, by how long that took."""
    from gpuprobe.recording.summary import causes_of  # 60 ms, for a pane that few open

    worker = get_current_worker()
    began = time.monotonic()
    found: tuple[MemoryCause, ...] | Unavailable
    try:
        found = causes_of(recording)
    except GpuprobeError as error:
        found = Unavailable(str(error))
    post(CausesRead(found))
    _wait(worker, _SHARE * (time.monotonic() - began))


MOST_OPEN = 3
"""Steps whose traces stay open. A trace of a million events takes about 150 MB."""


class OpenTraces:
    """A cache of open traces, safe to use from several threads.

    Each trace is opened once, by the first thread that needs it; the others wait: threads that
    decode at the same time would only take turns.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: OrderedDict[tuple[int, TraceRef], list[TraceInspector]] = OrderedDict()

    def of(self, rank: RankRecording, ref: TraceRef) -> list[TraceInspector]:
        """The traces of a step. Raises what `open_traces` raises."""
        key = (rank.session.rank, ref)
        with self._lock:
            traces = self._open.get(key)
            if traces is None:
                with gc_paused():
                    traces = self._open[key] = open_traces(rank, ref)
                gc.freeze()  # the objects of a trace form no cycles; until `release_objects`
            self._open.move_to_end(key)
            while len(self._open) > MOST_OPEN:
                self._open.popitem(last=False)
            return traces

    def peak(self, rank: RankRecording, position: int) -> StepPeak | Unavailable:
        """The memory at the peak of the step at a position in the rank's steps."""
        step = rank.steps[position]
        if not step.traces:
            return step_peak(rank, step)
        try:
            inspectors = self.of(rank, TraceRef(step.index, position))
        except GpuprobeError as error:
            return Unavailable(str(error))
        return _peak_of(inspectors[0]) if inspectors else step_peak(rank, step)

    def forget(self) -> None:
        """Close all traces: the next use reads them again."""
        with self._lock:
            self._open.clear()


def _peak_of(inspector: TraceInspector) -> StepPeak:
    event = inspector.event(inspector.peak)
    rows = inspector.positions.alive(inspector.peak)

    def shares(grouping: str) -> tuple[Share[str], ...]:
        groups = inspector.grouped(rows, grouping, inspector.peak)
        return tuple(Share(group.key, group.bytes, len(group.rows)) for group in groups)

    return StepPeak(
        inspector.device,
        inspector.allocated[inspector.peak],
        event.phase if event is not None else "",
        shares("category"),
        shares("line"),
        shares("module"),
        shares("need") if inspector.uses_traced else (),
    )
