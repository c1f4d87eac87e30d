"""Allocated, active and reserved bytes over a trace, event by event."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress

from gpuprobe.analysis.trace.ledger import Ledger, ledger_of
from gpuprobe.analysis.trace.lifetimes import selector
from gpuprobe.model.actions import SEGMENT_ALLOC, SEGMENT_FREE, SEGMENT_MAP, SEGMENT_UNMAP
from gpuprobe.model.trace import MemoryTrace
from gpuprobe.model.values import ReadStatus, Unavailable


@dataclass(slots=True)
class Timeline:
    """Columns of equal length. Point 0 is before the first event; bytes throughout.

    Point *i* describes the moment after ``event[i]`` (-1 for the first point); ``time_us[i]`` is
    its time if events have times (the first point has the first event's). allocated ≤ active, and
    active ≤ reserved if ``reserved`` is known.
    """

    device: str
    event: Sequence[int]
    time_us: Sequence[int]
    allocated: Sequence[int]
    active: Sequence[int]
    reserved: Sequence[int] | Unavailable

    def __len__(self) -> int:
        return len(self.allocated)


def timeline(trace: MemoryTrace | Ledger) -> Timeline:
    """The curves of a trace with a point for each event; `thin` reduces them for a screen."""
    ledger = ledger_of(trace)
    events = ledger.trace.events
    times = array("q", events.time_us) or array("q", bytes(8 * ledger.events))
    return Timeline(
        device=ledger.trace.device,
        event=range(-1, ledger.events),
        time_us=times[:1] + times if times else array("q", [0]),
        allocated=ledger.allocated_after(),
        active=ledger.active_after(),
        reserved=_reserved(ledger),
    )


_GROWS = {SEGMENT_ALLOC: 1, SEGMENT_MAP: 1}
_SHRINKS = {SEGMENT_FREE: -1, SEGMENT_UNMAP: -1}
_SIGN = _GROWS | _SHRINKS


def _reserved(ledger: Ledger) -> Sequence[int] | Unavailable:
    """Reserved bytes, computed backwards from the final segments: only these have the absolute
    level.
    """
    trace = ledger.trace
    if not trace.segments:
        return Unavailable(
            "the trace has no segments, so the reserved level is unknown",
            ReadStatus.NOT_COLLECTED,
        )
    events = trace.events
    marked = list(compress(range(ledger.events), selector(events.action, *_SIGN)))
    changes = [_SIGN[events.action[event]] * events.size[event] for event in marked]
    level = sum(segment.total_size for segment in trace.segments) - sum(changes)
    found = array("q")
    for event, change in zip(marked, changes, strict=True):
        found += array("q", [level]) * (event + 1 - len(found))
        level += change
    found += array("q", [level]) * (ledger.events + 1 - len(found))
    return found


def thin(line: Timeline, points: int) -> Timeline:
    """Reduce a timeline to at most ``points`` points (never fewer than 8) and keep all extremes.

    The trace is split into equal stretches. Of each, the first lowest and the first highest point
    of each column stay; so do the first and last point of the whole.
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
