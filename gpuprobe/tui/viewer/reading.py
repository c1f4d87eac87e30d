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
from typing import Any

from textual.message import Message
from textual.worker import Worker, get_current_worker

from gpuprobe.api.live import (
    Followed,
    Insight,
    Neighbours,
    Share,
    StepPeak,
    Surroundings,
    TraceInspector,
    TraceRef,
    insight,
    neighbours,
    open_traces,
    out_of_memory,
    step_peak,
    trace_refs,
)
from gpuprobe.errors import GpuprobeError
from gpuprobe.model.io.gc_pause import gc_paused
from gpuprobe.model.run.recording import RankRecording, Recording
from gpuprobe.model.values import Unavailable
from gpuprobe.tui.viewer.run_model import Curves, RunModel, model_of

_ASK_EVERY = 5.0
"""Seconds between questions to the driver about who shares the GPU."""

_SHARE = 5
"""Reading the recording may take a fifth of the time; a longer read is repeated less often."""


@dataclass
class Polled(Message):
    """The recording as it is now, and the chosen rank of it made ready."""

    recording: Recording
    model: RunModel


@dataclass
class ReadFailed(Message):
    """It could not be read (any more). ``nothing_shown``: it never could."""

    error: GpuprobeError
    nothing_shown: bool


@dataclass
class PeakFound(Message):
    """What was alive at the peak of a step; ``key``: the rank and the step's index."""

    key: tuple[int, int]
    peak: StepPeak | Unavailable


@dataclass
class Around(Message):
    """What else was found about a rank."""

    rank: int
    found: Surroundings


def follow(
    followed: Followed,
    rank_wanted: Callable[[], int],
    interval: float,
    post: Callable[[Message], object],
    *,
    fresh: bool,
) -> None:
    """Read what is new again and again, until every rank has ended or the worker is cancelled.
    ``fresh``: nothing is shown yet. A failure ends it.
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
        rank = rank_wanted()
        model = model_of(recording, rank, curves.setdefault(rank, Curves()))
        post(Polled(recording, model))
        others = [at for at in range(len(recording.ranks)) if at != rank]
        running = model.running or any(model_of(recording, at).running for at in others)
        if recording.ranks and not running:
            return
        _wait(worker, max(interval, _SHARE * (time.monotonic() - began)))


@dataclass(frozen=True, slots=True)
class Shown:
    """The rank that is shown: its place in the recording, and the device it is shown for."""

    rank: RankRecording
    place: int
    device: str


def look_around(
    shown: Callable[[], Shown | None],
    interval: float,
    post: Callable[[Message], object],
    demo: str | None,
) -> None:
    """Ask the driver, the trend and the traces about the rank that is ``shown`` (None: they are
    not wanted now), again where there is something new; until the worker is cancelled.
    """
    worker = get_current_worker()
    seen: object = None
    inside: tuple[object, Insight | Unavailable | None] = (None, None)
    while not worker.is_cancelled:
        wanted = shown()
        state = wanted and (wanted.place, len(wanted.rank.steps), wanted.rank.end)
        if wanted is None or state == seen:
            _wait(worker, min(0.05 if wanted is None else 0.2, interval))
            continue
        seen = state
        rank, place, device = wanted.rank, wanted.place, wanted.device
        others: Neighbours | Unavailable
        try:
            others = neighbours(rank, device, demo)
        except GpuprobeError as error:
            others = Unavailable(str(error))
        when = out_of_memory(rank, device, others)
        traced = (place, trace_refs(rank)[-1:])
        known = inside[1] if inside[0] == traced else None
        post(Around(place, Surroundings(others, when, known)))
        if known is None:
            inside = (traced, insight(rank, device))
            post(Around(place, Surroundings(others, when, inside[1])))
        _wait(worker, max(interval, min(_ASK_EVERY, 10 * interval)))


def _wait(worker: Worker[Any], seconds: float) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until and not worker.is_cancelled:
        time.sleep(min(0.05, seconds))


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
