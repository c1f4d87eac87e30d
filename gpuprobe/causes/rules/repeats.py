"""The same values many times: expanded tensors that are made contiguous, repeated ones, and what is
computed from them element by element.
"""

from __future__ import annotations

from collections.abc import Iterator

from gpuprobe.causes.answer import Answer, EditKind
from gpuprobe.causes.live_memory import STATE, Excess, LiveMemory
from gpuprobe.causes.wording import of_names
from gpuprobe.model.causes import Bound
from gpuprobe.model.memory import Category
from gpuprobe.model.text import human_bytes
from gpuprobe.model.trace import Made

_LEAST = 2


def diagnose(live: LiveMemory) -> Iterator[Excess]:
    """Blocks whose values are those of a block that is a fraction of their size."""
    times = repeated(live)
    rows = [row for row in live.rows if row in times]
    if not rows:
        return
    main = max(rows, key=lambda row: (live.size[row], -row))
    root = _root(live, main, times)
    size = live.bytes_of(rows)
    yield Excess(
        Answer(
            "repeated-values",
            f"{human_bytes(size)}{of_names(live, rows)} are the same values "
            f"{times[main]:,} times: {live.text('made_name', root)} at {live.place(root)} "
            f"copies {human_bytes(live.size[root] // times[root])} so often",
            "use a view instead of copies: expand instead of repeat, or let the operator "
            "broadcast; for keys and values of grouped heads, group the queries instead "
            "(enable_gqa=True of scaled_dot_product_attention)",
            code=".expand(...)",
            edit=EditKind.EXPAND,
        ),
        root if root in live.needs else main,
        rows,
        "without the copies",
        sizes={
            row: live.size[row] // count if _root(live, row, times) != row else 0
            for row, count in times.items()
        },
        bound=Bound.OR_MORE,  # an operator may copy what it gets as a view
    )


def repeated(live: LiveMemory) -> dict[int, int]:
    """By row of the trace, how many times it has each of its values."""
    inputs, names = live.column("inputs"), live.column("made_name")
    requested = live.ledger.requested
    found: dict[int, int] = {}
    for row in range(len(inputs)):
        if not names[row] or not inputs[row] or live.category(row) in STATE - {Category.BUFFER}:
            continue
        how = live.how(row)
        source = live.source(row)
        if how is Made.COPY:
            of_source = _width_ratio(live, row, source)
            count = int(requested[row] / (inputs[row] * of_source))
            if count >= _LEAST:
                found[row] = count * found.get(-1 if source is None else source, 1)
                continue
        if how in (Made.COPY, Made.POINTWISE) and source in found and source is not None:
            alone = inputs[row] <= 1.1 * requested[source]
            whole = requested[row] >= requested[source] * _width_ratio(live, row, source) * 0.9
            if alone and (whole or how is Made.POINTWISE):
                found[row] = found[source]
    return found


def _width_ratio(live: LiveMemory, row: int, source: int | None) -> float:
    """How much wider an element of a row is than one of its source."""
    widths = live.column("width")
    if source is None or not widths[row] or not widths[source]:
        return 1.0
    return widths[row] / widths[source]


def _root(live: LiveMemory, row: int, times: dict[int, int]) -> int:
    for source in live.sources(row):
        if source not in times:
            break
        row = source
    return row
