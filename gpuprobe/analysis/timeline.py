"""Allocated, active and reserved bytes over a trace, event by event."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from gpuprobe.analysis.ledger import Ledger, ledger, selector
from gpuprobe.model.memory import TraceAction
from gpuprobe.model.trace import MemoryTrace
from gpuprobe.model.values import ReadStatus, Unavailable

__all__ = ["Timeline", "allocated_after", "thin", "timeline"]


@dataclass(slots=True)
class Timeline:
    """Columns of equal length. Point 0 is before the first event; bytes throughout.

    ``event[i]`` is the event after which point *i* was so (-1 for the first point);
    ``time_us[i]`` its time, where events have one (the first point takes the first event's).
    allocated ≤ active; and active ≤ reserved where ``reserved`` is known.
    """

    device: str
    event: Sequence[int]
    time_us: Sequence[int]
    allocated: Sequence[int]
    active: Sequence[int]
    reserved: Sequence[int] | Unavailable

    def __len__(self) -> int:
        return len(self.allocated)


def allocated_after(book: Ledger) -> array[int]:
    """Allocated bytes: at index 0 before the first event, at ``i + 1`` after event ``i``."""
    return _running(book, book.freed)


def _running(book: Ledger, ends: Sequence[int]) -> array[int]:
    """The running total of ``size`` from each row's start to its end."""
    # One place more than there are events: ends at ``events`` are blocks that stay alive.
    delta = [0] * (book.events + 1)
    made = book.made
    for start, end, size in zip(book.start[:made], ends[:made], book.size[:made], strict=True):
        delta[start] += size
        delta[end] -= size
    held = 0
    for end, size in zip(ends[made:], book.size[made:], strict=True):
        if end >= 0:
            held += size
            delta[end] -= size
    delta.pop()
    return array("q", accumulate(delta, initial=held))


def timeline(trace: MemoryTrace | Ledger) -> Timeline:
    """Every point of the trace. `thin` makes fewer of them for a screen."""
    book = ledger(trace)
    events = book.trace.events
    times = events.column("time_us")
    first = times[:1] if len(times) else (0,)
    return Timeline(
        device=book.trace.device,
        event=range(-1, book.events),
        time_us=array("q", [*first, *times]),
        allocated=allocated_after(book),
        active=_running(book, book.done),
        reserved=_reserved(book),
    )


_GROWS = {TraceAction.SEGMENT_ALLOC.code: 1, TraceAction.SEGMENT_MAP.code: 1}
_SHRINKS = {TraceAction.SEGMENT_FREE.code: -1, TraceAction.SEGMENT_UNMAP.code: -1}
_SIGN = _GROWS | _SHRINKS


def _reserved(book: Ledger) -> Sequence[int] | Unavailable:
    """Worked out backwards from the final segments, which alone tell the absolute level."""
    trace = book.trace
    if not trace.segments:
        return Unavailable(
            "the trace has no segments, so the reserved level is not known",
            ReadStatus.NOT_COLLECTED,
        )
    events = trace.events
    delta = [0] * book.events
    marked = selector(events.action, *_SIGN)
    at = marked.find(1)
    while at >= 0:
        delta[at] = _SIGN[events.action[at]] * events.size[at]
        at = marked.find(1, at + 1)
    final = sum(segment.total_size for segment in trace.segments)
    return array("q", accumulate(delta, initial=final - sum(delta)))


def thin(line: Timeline, points: int) -> Timeline:
    """At most ``points`` of the points (but never fewer than 8), every extreme kept.

    The trace is cut into equal stretches; of each, the first lowest and first highest point of
    each column stays, and the first and last point of the whole.
    """
    length = len(line)
    if length <= max(points, 8):
        return line
    columns = [line.allocated, line.active]
    if not isinstance(line.reserved, Unavailable):
        columns.append(line.reserved)
    stretches = max(1, (points - 2) // (2 * len(columns)))
    keep = {0, length - 1}
    for stretch in range(stretches):
        low, high = stretch * length // stretches, (stretch + 1) * length // stretches
        if low == high:
            continue
        for column in columns:
            part = column[low:high]
            keep.add(low + part.index(min(part)))
            keep.add(low + part.index(max(part)))
    chosen = sorted(keep)

    def pick(column: Sequence[int]) -> array[int]:
        return array("q", map(column.__getitem__, chosen))

    return Timeline(
        device=line.device,
        event=pick(line.event),
        time_us=pick(line.time_us),
        allocated=pick(line.allocated),
        active=pick(line.active),
        reserved=line.reserved if isinstance(line.reserved, Unavailable) else pick(line.reserved),
    )
