"""A trace with requests added: memory that a library may have taken for one kernel."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace
from typing import Final, NamedTuple

from gpuprobe.allocator.replays.replay import TraceReplay
from gpuprobe.model.memory import TraceAction
from gpuprobe.model.trace import COLUMNS, EventColumns, MemoryTrace

_OOM: Final = TraceAction.OOM.code


class Request(NamedTuple):
    """``size`` bytes, wanted before the event ``at`` of a trace and given back at once."""

    at: int
    size: int
    stream: int
    pool: int


def with_requests(
    trace: MemoryTrace, recorded: TraceReplay, requests: Sequence[Request]
) -> tuple[MemoryTrace, TraceReplay]:
    """Both for `what_if`, with the requests served in between. They are written as requests that
    failed, which a what-if serves where it can, and gives back.
    """
    requests = sorted(requests, key=lambda request: request.at)
    events, old = EventColumns(), trace.events
    for name in COLUMNS:
        column, former = getattr(events, name), getattr(old, name)
        if not len(former):
            continue
        start = 0
        for request in requests:
            column.extend(former[start : request.at])
            column.append(_OOM if name == "action" else getattr(request, name, 0))
            start = request.at
        column.extend(former[start:])
    places = [request.at for request in requests]

    def moved(index: int) -> int:
        return index + bisect_right(places, index)

    return replace(trace, events=events), replace(
        recorded,
        flushes=tuple(map(moved, recorded.flushes)),
        unclear=tuple(replace(one, event=moved(one.event)) for one in recorded.unclear),
        overflows=tuple(replace(one, event=moved(one.event)) for one in recorded.overflows),
        held={pool: moved(event) for pool, event in recorded.held.items()},
    )
