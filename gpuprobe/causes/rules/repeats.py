"""The same values many times: expanded tensors that are made contiguous, repeated ones, and what is
computed from them element by element, or row by row; and matrices of which a batch has one for each
element.
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
_GATHERED = 4
"""How many times as many bytes selected matrices have as all that there are, and as their products,
at least."""
_BY_INDEX = frozenset(("index", "index_select", "embedding"))
_BATCHED = frozenset(("bmm", "baddbmm"))


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
            "broadcast; compute what depends on the rows alone before they are repeated; for keys "
            "and values of grouped heads, group the queries instead (enable_gqa=True of "
            "scaled_dot_product_attention)",
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


def gathered(live: LiveMemory) -> Iterator[Excess]:
    """Matrices that are selected by indices, far more often than there are, for one product each
    whose result is small.
    """
    requested, inputs = live.ledger.requested, live.column("inputs")
    times = {
        row: requested[row] // inputs[row]
        for row in live.rows
        if live.text("made_name", row) in _BY_INDEX
        and 0 < _GATHERED * inputs[row] <= requested[row]
        and (made := live.made_by.get(live.lives.first[row])) is not None
        and live.text("made_name", made) in _BATCHED
        and _GATHERED * requested[made] <= requested[row]
    }
    if not times:
        return
    main = live.largest(times)
    source = live.source(main)
    of = requested[main] // times[main] if source is None else requested[source]
    yield Excess(
        Answer(
            "repeated-values",
            f"{human_bytes(live.bytes_of(times))}{of_names(live, list(times))} are the same "
            f"matrices many times: {live.text('made_name', main)} at {live.place(main)} copies "
            f"one for each element of a batch, from {human_bytes(of)}",
            "multiply the elements that have a matrix in common at once, with that matrix (group "
            "them by index), so that it is broadcast and not copied",
        ),
        main,
        list(times),
        "without the copies",
        sizes={
            row: live.size[row] // times[main]
            for row in (*live.alike(times), *live.gradients(times))
        },
    )


def repeated(live: LiveMemory) -> dict[int, int]:
    """By row of the trace, how many times it has each of its values."""
    inputs, names = live.column("inputs"), live.column("made_name")
    requested = live.ledger.requested
    times: dict[int, int] = {}
    for row in range(len(inputs)):
        if not names[row] or not inputs[row] or live.category(row) in STATE - {Category.BUFFER}:
            continue
        how = live.how(row)
        source = live.source(row)
        if how is Made.COPY:
            of_source = _width_ratio(live, row, source)
            count = int(requested[row] / (inputs[row] * of_source))
            if count >= _LEAST:
                times[row] = count * times.get(-1 if source is None else source, 1)
                continue
        if source is None or source not in times:
            continue
        if live.multiplied(row, source):
            times[row] = times[source]
        elif how in (Made.COPY, Made.POINTWISE):
            alone = inputs[row] <= 1.1 * requested[source]
            whole = requested[row] >= requested[source] * _width_ratio(live, row, source) * 0.9
            if alone and (whole or how is Made.POINTWISE):
                times[row] = times[source]
    return times


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
