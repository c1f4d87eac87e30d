"""Blocks of which operators read a small part: a view that keeps its base, logits of a whole
sequence for its last token, a data set on the GPU.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace

from gpuprobe.causes.answer import Answer, EditKind
from gpuprobe.causes.live_memory import STATE, Excess, LiveMemory
from gpuprobe.causes.wording import of_names
from gpuprobe.model.causes import Bound
from gpuprobe.model.place import Place
from gpuprobe.model.text import human_bytes
from gpuprobe.model.trace import Made

_MOST = 0.5
_SOON = 3
"""Operators within which a part of a new block is used, at most. Kept views wait longer."""
_ROW_WISE = frozenset(("_log_softmax", "_softmax", "gather", "squeeze", "log_softmax", "softmax"))

_SELECTING = frozenset(("index", "index_select"))


def diagnose(live: LiveMemory) -> Iterator[Excess]:
    """Blocks that are read in half or less."""
    read = _read(live)
    partly = [
        row
        for row in live.rows
        if 0 < read[row] <= _MOST * live.ledger.requested[row]
        and live.category(row) not in STATE
        and not live.needs[row].needless
        and not _filled_later(live, row)
    ]
    whole = [row for row in partly if _stays(live, row)]
    if whole:
        yield _data_set(live, whole)
    now = [
        row
        for row in partly
        if row not in whole and (live.lives.last[row] >= live.now or live.lives.used_later(row))
    ]
    new = [row for row in now if live.now - live.lives.made[row] <= _SOON]
    old = [row for row in now if row not in new]
    if new and not live.bytes_of(old) > live.bytes_of(new):
        yield _computed_in_whole(live, new)
    elif old:
        yield _kept_by_views(live, [*old, *new])
    if not new:
        yield from _gradients_in_whole(live, read)
    yield from _read_again_in_part(live)
    yield from _rows_thrown_away(live)
    yield from _selected_late(live, read)


def _stays(live: LiveMemory, row: int) -> bool:
    """Whether it is a copy from the CPU, or older than the step and used in later ones."""
    return _moved(live, row) or (row >= live.ledger.made and live.lives.survives(row))


def _filled_later(live: LiveMemory, row: int) -> bool:
    """Whether it is allocated in this step, to be written and read in later ones as well."""
    new = row < live.ledger.made and live.lives.survives(row)
    return new and live.how(row) is Made.FILL


def _sizes(live: LiveMemory, rows: list[int]) -> dict[int, int]:
    read = _read(live)
    return {row: read[row] for row in live.alike(rows) if read[row]}


def _read(live: LiveMemory) -> list[int]:
    """The bytes of each row that operators read. Of a row from which they only select by indices,
    that is what they make: which elements, a trace does not have. A buffer that was allocated on
    the GPU, and that the program writes into, is there to be selected from: its column counts.
    """
    read = list(live.column("read"))
    for row, products in live.products.items():
        if not (live.is_temporary(row) or _moved(live, row)):
            continue
        names = {live.text("made_name", one) for one in products}
        if names <= _SELECTING and live.text("last_name", row) in _SELECTING:
            read[row] = min(read[row], sum(live.ledger.requested[one] for one in products))
    for row, size in _read_later(live, read).items():
        read[row] = size
    return read


def _read_later(live: LiveMemory, read: Sequence[int]) -> Mapping[int, int]:
    """The bytes that a later step reads of rows that this one only makes: as many as this one reads
    of those that the same code made in the step before.
    """
    lives, made, requested = live.lives, live.ledger.made, live.ledger.requested
    later = [
        row for row in live.rows if row < made and not lives.last[row] and lives.used_later(row)
    ]
    if not later:
        return {}
    before = lives.operator_at(-1)
    here: dict[object, int] = {}
    for row in live.rows:
        if row >= made and lives.first[row] > before:
            kind = live.kinds[row], requested[row]
            here[kind] = max(read[row], here.get(kind, 0))
    return {row: here.get((live.kinds[row], requested[row]), 0) for row in later}


def _moved(live: LiveMemory, row: int) -> bool:
    """Whether a row is a copy of a tensor of the CPU."""
    return live.how(row) is Made.COPY and live.source(row) is None


def _what(live: LiveMemory, rows: list[int]) -> str:
    """How much of which memory is read, to begin a sentence."""
    every = _read(live)
    read = sum(every[row] for row in rows)
    share = f"{human_bytes(read)} of {human_bytes(live.bytes_of(rows))}"
    return f"{share}{of_names(live, rows)} from {live.place(live.largest(rows))}"


def _excess(
    live: LiveMemory,
    rows: list[int],
    answer: Answer,
    bound: Bound,
    assumed: str = "with only what is read",
) -> Excess:
    return Excess(answer, live.largest(rows), rows, assumed, _sizes(live, rows), bound=bound)


def _data_set(live: LiveMemory, rows: list[int]) -> Excess:
    answer = Answer(
        "resident-data",
        f"{_what(live, rows)} are read in a step: the rest waits on the GPU for others, if any",
        "keep it on the CPU, and move each batch, or the part, when it is used (with pinned memory "
        "and non_blocking=True, if the copies take time), or make the part then",
    )
    # What the step selects of it is the batch then.
    return _excess(live, rows, answer, Bound.OR_LESS, "with only what this step reads on the GPU")


def _read_again_in_part(live: LiveMemory) -> Iterator[Excess]:
    """Blocks that operators have read in whole, and read again in half or less: by then only views
    of a part are there, as of what a hook stores. Not those that are read part by part.
    """
    requested, inputs, made = live.ledger.requested, live.column("inputs"), live.lives.made
    again: dict[int, int] = {}
    for row in live.rows:
        products = live.results(row)
        later = {one for one in products if made[one] > live.now}
        parts = {one for one in products if inputs[one] <= _MOST * requested[row]}
        if not later or parts != later or live.lives.last[row] != max(made[one] for one in later):
            continue
        read = sum(inputs[one] for one in later)
        new = row < live.ledger.made and not live.lives.used_later(row)
        kept = new and not live.for_backward(row) and len(later) < len(products)
        if kept and read <= _MOST * requested[row] and live.category(row) not in STATE:
            again[row] = read
    if again:
        rows = list(again)
        text = f"{human_bytes(sum(again.values()))} of {human_bytes(live.bytes_of(rows))}"
        yield Excess(
            Answer(
                "view-keeps-base",
                f"only {text}{of_names(live, rows)} from {live.place(live.largest(rows))} are read "
                "again: views of a part keep the whole",
                "clone the view: its memory is then all that is kept",
                code=".clone()",
                edit=EditKind.CLONE,
            ),
            live.largest(rows),
            rows,
            "with only what is read again, from the beginning",
            sizes=again,
            bound=Bound.OR_MORE,  # the base is there until it is cloned
        )


def _kept_by_views(live: LiveMemory, rows: list[int]) -> Excess:
    answer = Answer(
        "view-keeps-base",
        f"only {_what(live, rows)} are read: views of a part keep the whole",
        "clone the view: its memory is then all that is kept",
        code=".clone()",
        edit=EditKind.CLONE,
    )
    return _excess(live, rows, answer, Bound.OR_MORE)  # the base is there until it is cloned


def _selected(live: LiveMemory, read: Sequence[int]) -> list[int]:
    """The temporaries of which all that is made is a part, selected by indices."""
    requested = live.ledger.requested
    return [
        row
        for row, products in live.products.items()
        if live.is_temporary(row)
        and 0 < read[row] <= _MOST * requested[row]
        and {live.text("made_name", one) for one in products} <= _SELECTING
    ]


def _gradients_in_whole(live: LiveMemory, read: Sequence[int]) -> Iterator[Excess]:
    """Gradients of tensors of which only a part was selected by indices: zeros, but for that."""
    requested = live.ledger.requested
    selected = [row for row in _selected(live, read) if live.text("last_name", row) in _SELECTING]
    graded = [row for row in live.gradients(selected) if live.how(row) is Made.FILL]
    if alive := [row for row in graded if row in live.needs]:
        sizes = {requested[row] for row in alive}
        of = [row for row in selected if requested[row] in sizes]
        yield replace(_computed_in_whole(live, of), rows=alive)


def _computed_in_whole(live: LiveMemory, rows: list[int]) -> Excess:
    answer = Answer(
        "computed-in-whole",
        f"only {_what(live, rows)} are read: the rest is computed and thrown away",
        "select the part before this operator instead of after it: of logits, the hidden states "
        "of the last position only, or of the chosen ones",
    )
    # What is computed from it is smaller, too.
    excess = _excess(live, rows, answer, Bound.OR_LESS)
    read = _read(live)
    share = max(read[row] / live.ledger.requested[row] for row in rows)
    graded = {row: int(live.size[row] * share) for row in live.gradients(rows)}
    return replace(excess, sizes={**excess.sizes, **graded})


def _rows_thrown_away(live: LiveMemory) -> Iterator[Excess]:
    """Large blocks whose rows each give one value, of which a part is read."""
    read, requested = live.column("read"), live.ledger.requested
    for small in range(len(live.ledger)):
        if not 0 < read[small] <= _MOST * requested[small] or live.category(small) in STATE:
            continue
        if live.text("made_name", small) not in _ROW_WISE:
            continue
        group = {small}
        for row in live.sources(small):
            if requested[row] <= requested[small]:
                break
            group.add(row)
            if live.text("made_name", row) not in _ROW_WISE and (
                live.how(row) is not Made.POINTWISE
            ):
                break
        ready = [one for one in group if one != small]
        while ready:
            for product in live.products.get(ready.pop(), ()):
                if product not in group and 2 * requested[product] >= max(
                    requested[one] for one in group
                ):
                    group.add(product)
                    ready.append(product)
        alive = [one for one in group if one in live.needs]
        if not alive:
            continue
        group |= live.internals(group)
        share = read[small] / requested[small]
        main = max(
            (one for one in alive if not live.in_backward(one)),
            key=lambda one: live.size[one],
            default=alive[0],
        )
        yield Excess(
            Answer(
                "computed-in-whole",
                f"{human_bytes(live.bytes_of(alive))}{of_names(live, alive)} from "
                f"{live.place(main)} are rows of which {share:.0%} are read at the end "
                f"({live.last_place(small) or live.place(small)})",
                "select the rows before this operator instead of after it: of logits, those of the "
                "completion only",
            ),
            main,
            alive,
            "with only the rows that are read",
            sizes={one: int(live.size[one] * share) for one in live.alike(group)},
            bound=Bound.OR_LESS,  # gradients of these rows are smaller, too
        )
        return


def _selected_late(live: LiveMemory, read: Sequence[int]) -> Iterator[Excess]:
    """What is computed element by element or row by row, only to select rows of the result by
    indices.
    """
    requested = live.ledger.requested
    shares: dict[int, float] = {}
    selected = _selected(live, read)
    ready = sorted(selected, reverse=True)
    for row in selected:
        shares[row] = read[row] / requested[row]
    while ready:
        row = ready.pop(0)
        source = live.source(row)
        if source is None or source in shares or not _row_wise(live, row, source):
            continue
        if live.is_temporary(source) and _only_for(live, source, shares):
            shares[source] = shares[row]
            ready.append(source)
    alive = [row for row in shares if row in live.needs]
    if not alive or len(alive) == len([row for row in alive if row in selected]):
        return  # `_computed_in_whole` has what is only selected from
    main = live.largest(alive)
    names = list(dict.fromkeys(filter(None, (live.variable(live.frames(r)) for r in selected))))
    what = f" for {', '.join(names)}" if names else ""
    at = next((live.place(one) for one in live.products[max(selected)]), None)
    most = max(0.01, *(shares[row] for row in alive))
    yield Excess(
        Answer(
            "computed-in-whole",
            f"{human_bytes(live.bytes_of(alive))} from {live.place(main)}{what} are rows of which "
            f"{most:.0%} or fewer are selected by indices at {at}: the rest is computed and thrown "
            "away",
            "select before these operators instead of after them, so that only the chosen rows are "
            "computed",
        ),
        main,
        alive,
        "with only the rows that are selected",
        sizes={
            row: int(live.size[row] * share)
            for one, share in shares.items()
            for row in live.alike([one])
        },
        kept_at=at if isinstance(at, Place) else None,
        bound=Bound.OR_LESS,  # what is computed from them is smaller, too
    )


def _row_wise(live: LiveMemory, row: int, source: int) -> bool:
    """Whether rows are computed each from a row of the source: element by element, by a copy, or by
    a product with a small matrix.
    """
    requested = live.ledger.requested
    if _MOST * requested[row] > requested[source]:
        return False
    return live.multiplied(row, source) or live.how(row) in (Made.POINTWISE, Made.COPY)


def _only_for(live: LiveMemory, row: int, known: Collection[int]) -> bool:
    """Whether the forward pass makes nothing else of a row."""
    return all(one in known or live.in_backward(one) for one in live.products.get(row, ()))
