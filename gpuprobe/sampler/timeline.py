"""The phases of a step: a stack of names, and a mark at every change. Pure code, no torch.

The time of a step is divided into spans, one from each mark to the next, each under one phase path.
Spans cover the step without gaps, so the durations of the phases of depth one sum to the step's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import repeat
from typing import NamedTuple

from gpuprobe.model.memory import AllocatorCounts
from gpuprobe.model.run.communication import Exchange
from gpuprobe.model.run.launches import NOT_COUNTED, StepLaunches
from gpuprobe.model.run.session import (
    AllocatorActivity,
    BlindSpot,
    Collective,
    DeviceWindow,
    HostWait,
    HostWindow,
    KnownTensors,
    Phase,
    Placed,
    Step,
)
from gpuprobe.model.run.work import NOT_FOLLOWED, StepWork
from gpuprobe.model.values import Bytes, Peak, Unavailable
from gpuprobe.sampler.base import AtEnd, DeviceMark, Mark, as_bytes

_NOT_WAITED = Unavailable("not collected")
_NO_GPU_TIME = Unavailable("not collected")  # the default: it takes no space in a recording

OTHER = "other"
"""The phase of time that no hook and no user phase claims."""

MOST = 50_000
"""Spans of one step that are recorded separately; they take about 20 MB. A program that evaluates
for hours without a training step has more: the rest of such a step is one span of phase `OTHER`."""

MANY_PHASES = BlindSpot(
    f"phases of a step after the first {MOST:,} phase changes",
    "the rest of that step is in phase 'other'; its memory and time are counted",
)

COMPILED = BlindSpot(
    "module calls: the program uses torch.compile, and hooks would trigger recompilation",
    "'forward' covers everything between loading data (or the optimizer) and the backward pass; "
    "memory is attributed to modules only inside compiled code on a GPU, and not tracked inside "
    "compiled kernels",
)

SETUP = "setup"
"""The phase before any sign of training: imports, building the model."""


EVALUATION = "evaluation"
"""The phase of forward passes that no backward pass follows."""

_PASSES = ("forward", "backward", "optimizer")

HOST_RISE = 16 * 1024 * 1024
"""Bytes by which the peak of resident memory must rise for `counters_rose`."""


class PhaseSpan(NamedTuple):
    """A stretch of time in one phase, between two marks."""

    path: str
    start: Mark
    end: Mark


class _Level:
    __slots__ = ("again", "name", "sticky")

    def __init__(self, name: str) -> None:
        self.name = name
        self.sticky = False
        self.again = 0  # times that it was entered while it was the current one


class PhaseTimeline:
    """Turns phase changes into spans.

    A *sticky* phase continues after it was left, until the next one begins: the forward phase ends
    where the backward pass starts, not where the model returned (the loss is part of it).
    """

    def __init__(self, read: Callable[[], Mark]) -> None:
        self._read = read
        self._stack: list[_Level] = []
        self._rest = SETUP
        self._mark = read()
        self.started_ns = self._mark.time_ns
        self._spans: list[PhaseSpan] = []
        self.overflowed = False
        """Whether a step had more than `MOST` spans."""
        self.path = SETUP
        """The path of the current phase. An attribute: it is read at every allocation."""
        self.path_changed: Callable[[str], None] | None = None
        """Called with each new `path`."""
        self.progress: Callable[[str], None] | None = None
        """As well, for whoever waits for the program."""

    def enter(self, name: str) -> None:
        """Begin the phase ``name`` inside the current one. If that has the same name (the program's
        own ``forward`` around the one that a hook reports), both are one phase.
        """
        if self._stack and not self._stack[-1].sticky and self._stack[-1].name == name:
            self._stack[-1].again += 1
            return
        if self._stack and self._stack[-1].sticky:
            if self._stack[-1].name == name:  # forward again: the same phase continues
                self._stack[-1].sticky = False
                return
            self._stack.pop()
        self._close()
        self._rest = OTHER
        self._stack.append(_Level(name))
        self._update_path()

    def leave(self, *, sticky: bool = False) -> None:
        """End the innermost phase that has not already ended."""
        if self._stack and self._stack[-1].sticky:
            self._stack.pop()  # it had ended; the enclosing phase is left now
        if self._stack and self._stack[-1].again:
            self._stack[-1].again -= 1
            return
        if self._stack and sticky:
            self._stack[-1].sticky = True
            return
        self._close()
        if self._stack:
            self._stack.pop()
        self._update_path()

    def cut(self, *, leave: bool = False) -> list[PhaseSpan]:
        """End the current span here; return all spans since the last cut.

        ``leave``: the innermost phase ends here too, at the same mark.
        """
        if self._stack and self._stack[-1].sticky:
            self._stack.pop()
        self._close()
        if leave and self._stack:
            level = self._stack[-1]
            if level.again:
                level.again -= 1
            else:
                self._stack.pop()
        self._update_path()
        spans, self._spans = self._spans, []
        return spans

    def so_far(self, now: Mark) -> list[PhaseSpan]:
        """The spans since the last cut, with the current one until ``now``; it continues."""
        return [*self._spans, PhaseSpan(self.path, self._mark, now)]

    def skip(self) -> None:
        """Forget the time since the last cut: it belongs to no step."""
        self.cut()
        self._rest = OTHER
        self._update_path()

    def was_training(self) -> None:
        """The evaluations since the last pass of another kind were forward passes of training: the
        backward pass that begins is theirs.
        """
        spans = self._spans
        for at in range(len(spans) - 1, -1, -1):
            first, _, rest = spans[at].path.partition("/")
            if first in _PASSES:
                break
            if first == EVALUATION:
                spans[at] = spans[at]._replace(path=f"forward/{rest}" if rest else "forward")
        if self._stack and self._stack[0].name == EVALUATION:
            self._stack[0].name = "forward"
            self._update_path()

    def put_back(self, spans: list[PhaseSpan]) -> None:
        """Undo a `cut`: these spans are counted later."""
        self._spans[:0] = spans

    def restart(self, again: Callable[[Mark], Mark] | None = None) -> None:
        """Take a new mark without a span: the time since the last one is not counted. ``again``
        returns the mark, given the last one.
        """
        self._mark = self._read() if again is None else again(self._mark)

    @property
    def last_ns(self) -> int:
        """The time of the last mark (ns)."""
        return self._mark.time_ns

    def _update_path(self) -> None:
        self.path = "/".join(level.name for level in self._stack) or self._rest
        if self.path_changed is not None:
            self.path_changed(self.path)
        if self.progress is not None:
            self.progress(self.path)

    def _close(self) -> None:
        mark = self._read()
        spans = self._spans
        if len(spans) < MOST:
            spans.append(PhaseSpan(self.path, self._mark, mark))
        elif len(spans) == MOST:
            self.overflowed = True
            spans.append(PhaseSpan(OTHER, self._mark, mark))
        else:
            last = spans[-1]
            spans[-1] = last._replace(end=_with_peaks(mark, last.end))
        self._mark = mark


def _with_peaks(mark: Mark, earlier: Mark) -> Mark:
    """The mark, with the exact peaks since the one before ``earlier``."""
    peaks = {device.device: device.exact_peak for device in earlier.devices}
    return mark._replace(
        devices=tuple(
            device
            if device.exact_peak is None
            else device._replace(exact_peak=max(device.exact_peak, peaks.get(device.device) or 0))
            for device in mark.devices
        )
    )


class _Part(NamedTuple):
    """One device over one span."""

    start: DeviceMark
    end: DeviceMark
    allocated: Peak | Unavailable
    reserved: Peak | Unavailable


class _SpanValues(NamedTuple):
    """What a span adds to each of the phases that enclose it."""

    rss_peak: Peak | Unavailable
    parts: tuple[_Part, ...]


def _values_of(span: PhaseSpan) -> _SpanValues:
    start, end = span.start, span.end
    started = {mark.device: mark for mark in start.devices}
    parts = []
    for mark in end.devices:
        # A device that was first used in this span starts from nothing.
        before = started.get(mark.device) or _untouched(mark)
        parts.append(
            _Part(before, mark, _allocated_peak(before, mark), _reserved_peak(before, mark))
        )
    return _SpanValues(_peak((start.rss, end.rss), start.rss_peak, end.rss_peak), tuple(parts))


def _allocated_peak(start: DeviceMark, end: DeviceMark) -> Peak | Unavailable:
    if end.exact_peak is not None:
        return Peak.exactly(end.exact_peak)
    edges = start.counts.allocated, end.counts.allocated
    return _peak(edges, start.peak_allocated, end.peak_allocated)


def _reserved_peak(start: DeviceMark, end: DeviceMark) -> Peak | Unavailable:
    edges = start.counts.reserved, end.counts.reserved
    return _peak(edges, start.peak_reserved, end.peak_reserved)


class _Window:
    """One device over several spans."""

    __slots__ = ("activity", "end", "peak_allocated", "peak_reserved", "start")

    def __init__(self, start: DeviceMark) -> None:
        self.start = start
        self.end = start
        self.peak_allocated: Peak | Unavailable | None = None
        self.peak_reserved: Peak | Unavailable | None = None
        self.activity: AllocatorActivity | Unavailable = AllocatorActivity()

    def add(self, part: _Part) -> None:
        self.end = part.end
        self.peak_allocated = _joined(self.peak_allocated, part.allocated)
        self.peak_reserved = _joined(self.peak_reserved, part.reserved)
        self.activity = _activity_sum(self.activity, part.start.activity, part.end.activity)

    def done(self) -> DeviceWindow:
        unknown = Unavailable("no span")
        return DeviceWindow(
            device=self.start.device,
            start=self.start.counts,
            end=self.end.counts,
            peak_allocated=unknown if self.peak_allocated is None else self.peak_allocated,
            peak_reserved=unknown if self.peak_reserved is None else self.peak_reserved,
            activity=self.activity,
            inactive_split=self.end.inactive_split,
        )


def counters_rose(start: Mark, end: Mark) -> bool:
    """Whether a lifetime peak counter rose between the marks: of a device, or of the process's
    resident memory, which always grows a little.
    """
    before = {mark.device: mark for mark in start.devices}
    pairs = [(start.rss_peak, end.rss_peak, HOST_RISE)]
    for mark in end.devices:
        if mark.exact_peak is None:
            was = before.get(mark.device) or _untouched(mark)
            pairs.append((was.peak_allocated, mark.peak_allocated, 0))
            pairs.append((was.peak_reserved, mark.peak_reserved, 0))
    return any(
        after - earlier > least
        for earlier, after, least in pairs
        if not isinstance(earlier, Unavailable) and not isinstance(after, Unavailable)
    )


def _joined(one: Peak | Unavailable | None, two: Peak | Unavailable) -> Peak | Unavailable:
    if one is None:
        return two
    if isinstance(one, Unavailable):
        return one
    return two if isinstance(two, Unavailable) else one.joined(two)


def _peak(
    edges: tuple[int | Unavailable, ...], before: int | Unavailable, after: int | Unavailable
) -> Peak | Unavailable:
    """The peak of a window, from a lifetime counter read at both ends.

    A counter that rose did so in this window: its new value is the exact peak. One that did not
    rise is only an upper bound. One that fell was reset by the program in between: the peak before
    the reset is at most the old value.
    """
    if isinstance(before, Unavailable):
        return before
    if isinstance(after, Unavailable):
        return after
    least = 0
    for edge in edges:
        if isinstance(edge, Unavailable):
            return edge
        least = max(least, edge)
    # max(): the kernel's resident-memory counter may lag behind its own peak by a few pages.
    if after > before:
        return Peak.exactly(max(least, after))
    if after < before:
        return Peak(max(least, after), max(least, before))
    return Peak(least, max(least, after))


def _activity_sum(
    total: AllocatorActivity | Unavailable,
    start: AllocatorActivity | Unavailable,
    end: AllocatorActivity | Unavailable,
) -> AllocatorActivity | Unavailable:
    if isinstance(total, Unavailable):
        return total
    if isinstance(end, Unavailable):
        return end
    before = AllocatorActivity() if isinstance(start, Unavailable) else start
    # The program may reset these counters too: then they have counted since the reset.
    return AllocatorActivity(
        device_allocs=total.device_allocs + _rise(before.device_allocs, end.device_allocs),
        device_frees=total.device_frees + _rise(before.device_frees, end.device_frees),
        alloc_retries=total.alloc_retries + _rise(before.alloc_retries, end.alloc_retries),
        ooms=total.ooms + _rise(before.ooms, end.ooms),
    )


def _rise(before: int, after: int) -> int:
    return after - before if after >= before else after


class _Sum:
    """The sums of one phase path (or of the whole step) over several spans."""

    __slots__ = (
        "devices",
        "duration",
        "entries",
        "first",
        "gpu_ns",
        "last",
        "previous_end",
        "rss_peak",
    )

    def __init__(self, first: Mark) -> None:
        self.first = first
        self.last = first
        self.duration = 0
        self.entries = 0
        self.previous_end: Mark | None = None
        self.devices: dict[str, _Window] = {}
        self.rss_peak: Peak | Unavailable | None = None
        self.gpu_ns: int | Unavailable = 0

    def add(self, span: PhaseSpan, values: _SpanValues, gpu_ns: int | Unavailable) -> None:
        start, end = span.start, span.end
        self.duration += end.time_ns - start.time_ns
        if not isinstance(self.gpu_ns, Unavailable):
            self.gpu_ns = gpu_ns if isinstance(gpu_ns, Unavailable) else self.gpu_ns + gpu_ns
        if self.previous_end is not start:  # a child's spans follow without a gap
            self.entries += 1
        self.previous_end = self.last = end
        for part in values.parts:
            window = self.devices.get(part.end.device)
            if window is None:
                window = self.devices[part.end.device] = _Window(part.start)
            window.add(part)
        self.rss_peak = _joined(self.rss_peak, values.rss_peak)

    def windows(self) -> tuple[DeviceWindow, ...]:
        return tuple(window.done() for window in self.devices.values())

    def host(self) -> HostWindow:
        return HostWindow(
            rss_start=as_bytes(self.first.rss),
            rss_end=as_bytes(self.last.rss),
            rss_peak=Unavailable("no span") if self.rss_peak is None else self.rss_peak,
        )


def _untouched(mark: DeviceMark) -> DeviceMark:
    """The same device before the program used it."""
    zero = Bytes(0)
    return DeviceMark(
        mark.device,
        AllocatorCounts(zero, zero, zero, zero),
        0 if not isinstance(mark.peak_allocated, Unavailable) else mark.peak_allocated,
        0 if not isinstance(mark.peak_reserved, Unavailable) else mark.peak_reserved,
        AllocatorActivity(),
    )


def _spent(known: Mapping[str, int | Unavailable], path: str, duration: int) -> int | Unavailable:
    """The time that a phase of depth one waited, or copied, if any is known."""
    if not known or "/" in path:
        return _NOT_WAITED
    spent = known.get(path, 0)
    return spent if isinstance(spent, Unavailable) else min(spent, duration)


def assemble(
    index: int,
    spans: list[PhaseSpan],
    *,
    origin_ns: int,
    gpu_ns: Sequence[int | Unavailable] = (),
    tensors: Iterable[KnownTensors] = (),
    traces: Iterable[str] = (),
    collectives: tuple[Collective, ...] = (),
    placement: tuple[Placed, ...] = (),
    waited: Mapping[str, int | Unavailable] = {},
    copied: Mapping[str, int | Unavailable] = {},
    exchanges: tuple[Exchange, ...] = (),
    launches: StepLaunches | Unavailable = NOT_COUNTED,
    work: StepWork | Unavailable = NOT_FOLLOWED,
    host_waits: tuple[HostWait, ...] | Unavailable = _NOT_WAITED,
    ended_by: str = "optimizer",
    at_end: AtEnd | None = None,
) -> Step:
    """Build a step from its spans (at least one). ``origin_ns``: the session's start. ``gpu_ns``:
    the time of each span on the GPU; without it that is not collected. ``waited``: how long the
    phases of depth one waited for other ranks (`Waits.take`), ``copied``: how long they moved
    tensors to a device (`Copies.take`). ``at_end``: what was read once, when the step had ended.
    """
    whole = _Sum(spans[0].start)
    phases: dict[str, _Sum] = {}
    for span, spent in zip(spans, gpu_ns or repeat(_NO_GPU_TIME)):  # noqa: B905 - endless
        values = _values_of(span)
        whole.add(span, values, spent)
        path = span.path
        while path:  # the phase itself, then everything that encloses it
            if path not in phases:
                phases[path] = _Sum(span.start)
            phases[path].add(span, values, spent)
            path = path.rpartition("/")[0]
    return Step(
        index=index,
        start_ns=spans[0].start.time_ns - origin_ns,
        duration_ns=whole.duration,
        phases=tuple(
            Phase(
                path=path,
                start_ns=total.first.time_ns - origin_ns,
                duration_ns=total.duration,
                entries=total.entries,
                windows=total.windows(),
                host=total.host(),
                gpu_ns=total.gpu_ns,
                waited_ns=_spent(waited, path, total.duration),
                copied_ns=_spent(copied, path, total.duration),
            )
            for path, total in sorted(
                phases.items(), key=lambda item: (item[1].first.time_ns, item[0])
            )
        ),
        windows=tuple(at_end.window(w) for w in whole.windows()) if at_end else whole.windows(),
        host=at_end.host(whole.host()) if at_end else whole.host(),
        gpu_ns=whole.gpu_ns,
        tensors=tuple(tensors),
        traces=tuple(traces),
        collectives=collectives,
        exchanges=exchanges,
        launches=launches,
        work=work,
        host_waits=host_waits,
        placement=placement,
        ended_by=ended_by,
    )


class Passes:
    """Nested backward passes, and the recomputation of checkpoints in them."""

    def __init__(self) -> None:
        self.depth = 0
        self._again: list[bool] = []  # checkpoints being recomputed, and whether each still runs

    def begins(self, phase: str, timeline: PhaseTimeline) -> None:
        """A phase begins: enter it, by the name that it has inside a backward pass."""
        if phase == "backward":
            self.depth += 1
            if self.depth > 1:
                if self._again and self._again[-1]:  # the backward pass of what was recomputed
                    self._again[-1] = False
                    timeline.leave()
                return
        elif phase == "recompute":
            self._again.append(True)
        elif self.depth:  # checkpointing runs the model again inside the backward pass
            phase = "recompute" if phase == "forward" else phase
        timeline.enter(phase)

    def ends(self, phase: str) -> bool:
        """Whether a phase ends that was entered, and not left since."""
        if phase == "backward":
            self.depth -= 1
            return self.depth == 0
        return phase != "recompute" or bool(self._again and self._again.pop())
