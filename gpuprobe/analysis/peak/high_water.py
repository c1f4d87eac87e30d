"""The high water mark: the most memory that was allocated at once, and its blocks.

Conservation: the rows of each ``by_…`` function sum exactly to ``HighWater.allocated``. Memory
of unknown origin, and memory alive before the trace began, have separate rows.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from gpuprobe.analysis.trace.categories import categories
from gpuprobe.analysis.trace.ledger import Ledger, ledger_of
from gpuprobe.analysis.trace.lifetimes import selected
from gpuprobe.model.memory import Category
from gpuprobe.model.place import SourceLine
from gpuprobe.model.report import Key
from gpuprobe.model.trace import MemoryTrace, StackTable
from gpuprobe.user_frames import (
    Lines,
    UserFrame,
    is_user_frame,
    module_row,
)

K = TypeVar("K", bound=Key)


@dataclass(frozen=True, slots=True)
class Share(Generic[K]):
    """The part of an amount of memory that belongs to one key: ``bytes`` in ``blocks`` blocks."""

    key: K
    bytes: int
    blocks: int


@dataclass(slots=True)
class HighWater:
    """The blocks that were allocated at one instant, in columns of equal length.

    The instant is just after event number ``event``; -1 is the baseline, before the first event.
    ``size`` is the block's bytes, ``category`` its ``Category.code``, ``module`` an
    index of ``stacks.strings``; ``is_baseline`` is 1 for blocks alive before the trace.
    """

    ledger: Ledger  # for other analyses of the same trace
    device: str
    allocated: int  # bytes; the sum of ``size``
    event: int
    phase: str  # the phase of that event; empty if none was recorded
    time_us: int  # since the Unix epoch; 0 if unknown
    baseline_bytes: int  # the part that was alive before the trace
    stacks: StackTable
    address: array[int]
    size: array[int]
    stack: array[int]
    category: array[int]
    module: array[int]
    is_baseline: array[int]

    def __len__(self) -> int:
        return len(self.size)


def high_water(trace: MemoryTrace | Ledger) -> HighWater:
    """The first instant with the most allocated bytes, and the blocks alive then.

    A block counts from its allocation until its free is requested. The baseline itself is an
    instant: if memory never rises above it, ``event`` is -1.
    """
    ledger = ledger_of(trace)
    return live_at(ledger, ledger.peak())


def live_at(trace: MemoryTrace | Ledger, event: int) -> HighWater:
    """The blocks that were allocated just after ``event`` (-1: before the first)."""
    ledger = ledger_of(trace)
    rows = ledger.alive(event)
    events = ledger.trace.events
    strings = ledger.trace.stacks.strings
    size = array("Q", selected(ledger.size, rows))
    first_baseline = next((i for i, row in enumerate(rows) if row >= ledger.made), len(rows))
    at = max(event, 0)
    return HighWater(
        ledger=ledger,
        device=ledger.trace.device,
        allocated=sum(size),
        event=event,
        phase=strings[events.column("phase")[event]] if event >= 0 else "",
        time_us=events.column("time_us")[at] if ledger.events else 0,
        baseline_bytes=sum(size[first_baseline:]),
        stacks=ledger.trace.stacks,
        address=array("Q", ledger.values("address", rows)),
        size=size,
        stack=array("I", selected(ledger.stack, rows)),
        category=array("B", categories(ledger, rows)),
        module=array("I", ledger.values("module", rows)),
        is_baseline=array("B", bytes(first_baseline) + b"\1" * (len(rows) - first_baseline)),
    )


def by_category(mark: HighWater) -> tuple[Share[str], ...]:
    """The blocks by `Category`; ``unknown`` is a row as well."""
    return shares(mark.category, mark.size, lambda code: Category.from_code(code).value)


def by_module(mark: HighWater) -> tuple[Share[str], ...]:
    """The blocks by the module that allocated them; needs recorded modules."""
    strings = mark.stacks.strings
    keys = zip(mark.module, map(bool, mark.stack), mark.is_baseline, strict=True)
    return shares(
        keys,
        mark.size,
        lambda key: module_row(strings[key[0]], key[1], before=bool(key[2])),
    )


def by_line(mark: HighWater, is_user: UserFrame = is_user_frame) -> tuple[Share[SourceLine], ...]:
    """The blocks by the user's line that allocated them (`Lines`)."""
    lines = Lines(mark.stacks, is_user)
    keys = zip(mark.stack, mark.is_baseline, strict=True)
    return shares(keys, mark.size, lambda key: lines.place(key[0], before=bool(key[1])))


def modules_of_lines(mark: HighWater) -> dict[SourceLine, tuple[Share[str], ...]]:
    """The blocks of each line by the module that allocated them, as `by_line` and `by_module`."""
    totals: dict[tuple[int, int, int], tuple[int, int]] = {}
    keys = zip(mark.stack, mark.is_baseline, mark.module, strict=True)
    for key, size in zip(keys, mark.size, strict=True):
        held, blocks = totals.get(key, (0, 0))
        totals[key] = (held + size, blocks + 1)
    lines, strings = Lines(mark.stacks), mark.stacks.strings
    found: dict[SourceLine, dict[str, tuple[int, int]]] = {}
    for (stack, baseline, module), (size, count) in totals.items():
        before = bool(baseline)
        line = found.setdefault(lines.place(stack, before=before), {})
        name = str(module_row(strings[module], stack, before=before))
        held, blocks = line.get(name, (0, 0))
        line[name] = (held + size, blocks + count)
    return {
        line: tuple(
            Share(name, size, count)
            for name, (size, count) in sorted(parts.items(), key=lambda i: (-i[1][0], i[0]))
        )
        for line, parts in found.items()
    }


def shares(
    parts: Iterable[object], sizes: Sequence[int], key: Callable[..., K]
) -> tuple[Share[K], ...]:
    """Sum ``sizes`` by ``key(part)``; the most bytes first, then by name.

    ``key`` is called once per distinct part, not once per block.
    """
    found: dict[object, list[int]] = {}
    for part, size in zip(parts, sizes, strict=True):
        if part in found:
            found[part].append(size)
        else:
            found[part] = [size]
    merged: dict[K, tuple[int, int]] = {}
    for part, values in found.items():
        row = key(part)
        total, blocks = merged.get(row, (0, 0))
        merged[row] = (total + sum(values), blocks + len(values))
    return tuple(
        Share(row, total, blocks)
        for row, (total, blocks) in sorted(merged.items(), key=lambda i: (-i[1][0], str(i[0])))
    )


def as_text(rows: Iterable[Share[K]]) -> tuple[Share[str], ...]:
    """The rows with their keys as text."""
    return tuple(Share(str(row.key), row.bytes, row.blocks) for row in rows)
