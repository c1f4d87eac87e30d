"""Every allocation of a trace as one row: when it began, when it ended, how big it was.

The one pass that all other analysis starts from. Two sizes are kept apart:

* ``requested``: what the program asked for, as torch's trace records it;
* ``size``: the block the caching allocator gave. It is the requested size rounded up, plus the
  *slack* of a large block whose remainder was too small to split off. Torch's trace does not
  record it, so it is worked out from the allocator's rules and the addresses (`layout`), and
  for blocks alive at the end it is read from the final layout.

**allocated** below means bytes of blocks (``size``), as ``torch.cuda.memory_allocated`` counts.
At the end of a trace it equals the bytes of the ``active_allocated`` blocks of its segments.
Traces that do not come from the caching allocator (no segments, no settings, no segment
events: the CPU) have neither rounding nor slack.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress
from operator import itemgetter

from gpuprobe.analysis.layout import BlockSizes
from gpuprobe.model.memory import BlockState, TraceAction
from gpuprobe.model.trace import MemoryTrace

__all__ = ["Checks", "Ledger", "ledger", "picked", "selector"]

_ALLOC = TraceAction.ALLOC.code
_FREE_REQUESTED = TraceAction.FREE_REQUESTED.code
_FREE_COMPLETED = TraceAction.FREE_COMPLETED.code
_SEGMENT_ACTIONS = frozenset(
    a.code
    for a in (
        TraceAction.SEGMENT_ALLOC,
        TraceAction.SEGMENT_FREE,
        TraceAction.SEGMENT_MAP,
        TraceAction.SEGMENT_UNMAP,
    )
)


@dataclass(slots=True)
class Checks:
    """Where a trace contradicts itself, or its rows rest on an assumption. Counts of rows.

    All zero for a trace that a caching allocator wrote and nobody cut.
    """

    unlisted: int = 0  # alive before the trace, found from a free or from the final layout
    implied_frees: int = 0  # an address was given out again without a free
    lost: int = 0  # alive at the end by the events, not in the final layout
    resized: int = 0  # the final layout has another size than the rules gave
    assumed_slack: int = 0  # slack taken to be 0: the hole behind it hides what it was


@dataclass(slots=True)
class Ledger:
    """The allocations of one trace, in columns of equal length.

    Rows ``0 … made - 1`` were made by events, in order; the rest are the baseline: alive
    before the first event, ``start`` -1. ``freed`` is the event at which *allocated* drops
    (the free was requested), ``done`` the one at which *active* drops (it completed); both
    are ``events`` for what was still alive at the end. A baseline row with ``freed`` -1 was
    already pending: active, not allocated. Sizes in bytes.
    """

    trace: MemoryTrace
    events: int
    made: int
    start: array[int]
    freed: array[int]
    done: array[int]
    address: array[int]
    requested: array[int]
    size: array[int]
    stack: array[int]
    category: array[int]
    module: array[int]
    phase: array[int]
    stream: array[int]
    pool: array[int]
    by_allocator: bool  # the caching allocator's rules were applied
    checks: Checks

    def __len__(self) -> int:
        return len(self.start)

    def alive(self, event: int) -> list[int]:
        """The rows allocated just after ``event``; -1 means before the first one."""
        return [
            row
            for row, (start, freed) in enumerate(zip(self.start, self.freed, strict=True))
            if start <= event < freed
        ]


def selector(actions: array[int], *codes: int) -> bytes:
    """A byte per event: 1 where the action is one of ``codes``. For `itertools.compress`."""
    table = bytearray(256)
    for code in codes:
        table[code] = 1
    return actions.tobytes().translate(bytes(table))


def ledger(trace: MemoryTrace | Ledger) -> Ledger:
    """Match every free with its allocation. A ledger is returned as it is.

    Functions that take a trace also take its ledger, so that several of them share the pass.
    """
    if isinstance(trace, Ledger):
        return trace
    events, baseline = trace.events, trace.baseline
    count = len(events)
    checks = Checks()
    is_alloc = selector(events.action, _ALLOC)
    start = array("q", compress(range(count), is_alloc))
    made = len(start)

    address = array("Q", compress(events.address, is_alloc))
    requested = array("Q", compress(events.size, is_alloc))
    others = {
        name: array(typecode, compress(events.column(name), is_alloc))
        for name, typecode in _CARRIED.items()
    }
    # The baseline rows follow the made ones.
    listed = len(baseline)
    start.extend([-1] * listed)
    address.extend(baseline.address)
    requested.extend(baseline.size)
    for name, column in others.items():
        column.extend(baseline.column(name))

    freed = [count] * (made + listed)
    done = [count] * (made + listed)
    opened = dict(zip(baseline.address, range(made, made + listed), strict=True))

    def unlisted(at: int, size: int, event: int, **known: int) -> int:
        """Add a baseline row for memory that only its end gave away."""
        checks.unlisted += 1
        start.append(-1)
        address.append(at)
        requested.append(size)
        for name, column in others.items():
            column.append(known.get(name, 0))
        freed.append(event)
        done.append(count)
        return len(start) - 1

    is_segment = any(code in _SEGMENT_ACTIONS for code in set(events.action))
    by_allocator = bool(trace.segments) or trace.settings is not None or is_segment
    row = 0
    streams, pools = events.column("stream"), events.column("pool")
    for event, action, at in zip(range(count), events.action, events.address, strict=True):
        if action == _ALLOC:
            if at in opened:
                old = opened[at]
                done[old] = event
                if freed[old] == count:
                    freed[old] = event
                    checks.implied_frees += 1
            opened[at] = row
            row += 1
        elif action == _FREE_REQUESTED:
            if at in opened:
                freed[opened[at]] = event
            else:
                opened[at] = unlisted(
                    at, events.size[event], event, stream=streams[event], pool=pools[event]
                )
        elif action == _FREE_COMPLETED:
            if at in opened:
                old = opened.pop(at)
                done[old] = event
                if freed[old] == count:
                    freed[old] = event
            else:
                # Torch records both halves of a free. Where only the second is in the trace,
                # the block was already pending when the trace began.
                when = -1 if by_allocator else event
                old = unlisted(
                    at, events.size[event], when, stream=streams[event], pool=pools[event]
                )
                done[old] = event

    final: dict[int, int] = {}
    if trace.segments:
        pool_index = {pool: index for index, pool in enumerate(trace.pools)}
        for segment in trace.segments:
            for block in segment.blocks:
                if block.state is BlockState.INACTIVE:
                    continue
                at = block.address
                if at not in opened:
                    pending = block.state is BlockState.PENDING_FREE
                    opened[at] = unlisted(
                        at,
                        block.requested_size or block.size,
                        -1 if pending else count,
                        stack=block.stack,
                        stream=segment.stream,
                        pool=pool_index.get(segment.pool_id, 0),
                    )
                final[opened[at]] = block.size
        checks.lost = len(opened) - len(final)

    result = Ledger(
        trace=trace,
        events=count,
        made=made,
        start=start,
        freed=array("q", freed),
        done=array("q", done),
        address=address,
        requested=requested,
        size=requested,
        stack=others["stack"],
        category=others["category"],
        module=others["module"],
        phase=others["phase"],
        stream=others["stream"],
        pool=others["pool"],
        by_allocator=by_allocator,
        checks=checks,
    )
    if by_allocator:
        sizes = BlockSizes(trace, start, done, address, requested, final)
        result.size = sizes.size
        checks.resized, checks.assumed_slack = sizes.resized, sizes.assumed
    return result


_CARRIED = {
    "stack": "I",
    "category": "B",
    "module": "I",
    "phase": "I",
    "stream": "Q",
    "pool": "I",
}


def picked(column: Sequence[int], rows: Sequence[int]) -> tuple[int, ...]:
    """The values of ``column`` at ``rows``."""
    if len(rows) < 2:
        return tuple(column[row] for row in rows)
    return tuple(itemgetter(*rows)(column))
