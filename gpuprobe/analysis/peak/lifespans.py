"""How long the blocks at a high water mark live at least, from births and deaths alone: all that is
known of a trace without uses.
"""

from __future__ import annotations

from gpuprobe.analysis.trace.ledger import Ledger, ledger_of
from gpuprobe.model.needs import Lifespan, LifespanTable
from gpuprobe.model.trace import MemoryTrace


def lifespans_at(trace: MemoryTrace | Ledger, event: int) -> LifespanTable:
    """The blocks alive just after ``event``, by whether their begin and their end are in the trace,
    which has events.

    A block that was allocated before the trace lived from its first event on at least; one that is
    not freed in it, up to its last event. Only blocks that begin and end in it have their whole
    life there.
    """
    ledger = ledger_of(trace)
    times = ledger.trace.events.column("time_us")
    last = ledger.events - 1
    found: dict[tuple[bool, bool], list[tuple[int, int]]] = {}
    for row in ledger.alive(event):
        begins, ends = row < ledger.made, ledger.freed[row] <= last
        first, end = max(ledger.start[row], 0), min(ledger.freed[row], last)
        spent = 1000 * (times[end] - times[first])
        found.setdefault((begins, ends), []).append((max(0, spent), ledger.size[row]))
    rows = tuple(
        Lifespan(
            begins_in_trace=key[0],
            ends_in_trace=key[1],
            bytes=sum(size for _, size in found[key]),
            blocks=len(found[key]),
            shortest_ns=min(spent for spent, _ in found[key]),
            longest_ns=max(spent for spent, _ in found[key]),
        )
        for key in sorted(found)
    )
    timed = last >= 0 and bool(times[last])
    return LifespanTable(sum(row.bytes for row in rows), rows, timed)
