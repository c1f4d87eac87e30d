"""The same values many times: expanded tensors that are made contiguous, repeated ones, and what is
computed from them element by element, or row by row; and matrices of which a batch has one for each
element.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

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
_EMBEDDING = "embedding"
_BATCHED = frozenset(("bmm", "baddbmm"))
_CONVERTED = "_to_copy"
"""The copy that may be wider than what it is made of, if that is not in the trace."""


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
    """Matrices, or vectors of pairs, that are selected by indices, far more often than there are,
    for one product each whose result is small; and their gradients.
    """
    requested, inputs = live.ledger.requested, live.column("inputs")
    names = live.column("made_name")
    strings = live.ledger.trace.stacks.strings
    times = {
        row: requested[row] // inputs[row]
        for row in range(len(inputs))
        if 0 < _GATHERED * inputs[row] <= requested[row]
        and strings[names[row]] in _BY_INDEX
        and (made := live.made_by.get(live.lives.first[row])) is not None
        and live.text("made_name", made) in _BATCHED
        and _GATHERED * requested[made] <= requested[row]
    }
    graded = live.gradients(times) if times else []
    graded += live.internals({one for row in graded for one in live.products.get(row, ())})
    rows = [row for row in (*times, *graded) if row in live.needs]
    if not rows:
        return
    main = max(times, key=lambda row: (live.size[row], row in live.needs))
    yield Excess(
        _gathered_answer(live, main, rows),
        main,
        rows,
        "without the copies",
        sizes={row: live.size[row] // times[main] for row in (*live.alike(times), *graded)},
        bound=Bound.OR_MORE if live.text("made_name", main) == _EMBEDDING else Bound.EXACT,
    )


def _gathered_answer(live: LiveMemory, main: int, rows: list[int]) -> Answer:
    name, at = live.text("made_name", main), live.place(main)
    requested, inputs = live.ledger.requested, live.column("inputs")
    size = f"{human_bytes(live.bytes_of(rows))}{of_names(live, [main])}"
    if name == _EMBEDDING:
        product = live.made_by[live.lives.first[main]]
        return Answer(
            "broadcast-intermediate",
            f"{size} are rows of a table that are looked up for each pair, and their gradients: "
            f"{name} at {at} makes {human_bytes(requested[main])} of {human_bytes(inputs[main])}, "
            f"of which {human_bytes(requested[product])} remain",
            "a matrix product with the table first, then gather of the products by the same "
            "indices; or look up in chunks, each under torch.utils.checkpoint.checkpoint",
        )
    source = live.source(main)
    of = inputs[main] if source is None else requested[source]
    return Answer(
        "repeated-values",
        f"{size} are the same matrices many times: {name} at {at} copies one for each element of a "
        f"batch, from {human_bytes(of)}",
        "multiply the elements that have a matrix in common at once, with that matrix (group them "
        "by index), so that it is broadcast and not copied",
    )


def repeated(live: LiveMemory) -> dict[int, int]:
    """By row of the trace, how many times it has each of its values."""
    times: dict[int, int] = {}
    columns = zip(*map(live.column, ("inputs", "made_name", "how")), strict=True)
    for row, (inputs, name, how) in enumerate(columns):
        # Of a million rows most are no copies, and computed from none that is known.
        if not name or not inputs or (how != Made.COPY and not times):
            continue
        count = _repetitions(live, row, how, times)
        if count and live.category(row) not in _NEVER_REPEATED:
            times[row] = count
    return times


_NEVER_REPEATED: Final = STATE - {Category.BUFFER}


def _repetitions(live: LiveMemory, row: int, how: int, times: dict[int, int]) -> int:
    """How many times a row has each of its values, if ``times`` is known of what it was computed
    from; 0 if it does not repeat any.
    """
    source = live.source(row)
    inputs, requested = live.column("inputs")[row], live.ledger.requested
    if how == Made.COPY and not (source is None and live.text("made_name", row) == _CONVERTED):
        count = int(requested[row] / (inputs * _width_ratio(live, row, source)))
        if count >= _LEAST:
            return count * (1 if source is None else times.get(source, 1))
    if source is None or source not in times:
        return 0
    if live.multiplied(row, source):
        return times[source]
    if how not in (Made.COPY, Made.POINTWISE):
        return 0
    alone = inputs <= 1.1 * requested[source]
    whole = requested[row] >= requested[source] * _width_ratio(live, row, source) * 0.9
    return times[source] if alone and (whole or how == Made.POINTWISE) else 0


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
