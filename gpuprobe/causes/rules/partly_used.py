"""Blocks of which operators read a small part: a view that keeps its base, logits of a whole
sequence for its last token, a data set on the GPU.
"""

from __future__ import annotations

from collections.abc import Iterator

from gpuprobe.causes.answer import Answer, EditKind
from gpuprobe.causes.moment import STATE, Excess, Moment
from gpuprobe.causes.wording import of_names
from gpuprobe.model.text import human_bytes
from gpuprobe.model.trace import Made

_MOST = 0.5
_ROW_WISE = frozenset(("_log_softmax", "_softmax", "gather", "squeeze", "log_softmax", "softmax"))


def diagnose(moment: Moment) -> Iterator[Excess]:
    """Blocks that are read in half or less."""
    read = moment.column("read")
    partly = [
        row
        for row in moment.rows
        if 0 < read[row] <= _MOST * moment.ledger.requested[row]
        and moment.category(row) not in STATE
        and not moment.needs[row].needless
    ]
    whole = [row for row in partly if _stays(moment, row)]
    if whole:
        yield _data_set(moment, whole)
    new = [row for row in partly if row not in whole and moment.is_new(row)]
    old = [
        row
        for row in partly
        if row not in whole and not moment.is_new(row) and moment.lives.last[row] >= moment.now
    ]
    if new and not moment.bytes_of(old) > moment.bytes_of(new):
        yield _computed_in_whole(moment, new)
    elif old:
        yield _kept_by_views(moment, [*old, *new])
    yield from _rows_thrown_away(moment)


def _stays(moment: Moment, row: int) -> bool:
    """Whether it is older than the step, and used in later ones."""
    return row >= moment.ledger.made and moment.lives.survives(row)


def _sizes(moment: Moment, rows: list[int]) -> dict[int, int]:
    read = moment.column("read")
    return {row: read[row] for row in moment.alike(rows) if read[row]}


def _share(moment: Moment, rows: list[int]) -> str:
    read = sum(moment.column("read")[row] for row in rows)
    return f"{human_bytes(read)} of {human_bytes(moment.bytes_of(rows))}"


def _data_set(moment: Moment, rows: list[int]) -> Excess:
    main = max(rows, key=lambda row: moment.size[row])
    return Excess(
        Answer(
            "resident-data",
            f"{_share(moment, rows)}{of_names(moment, rows)} from {moment.place(main)} are read in "
            "a step: the rest waits on the GPU for other steps",
            "keep it on the CPU, and move each batch when it is used (with pinned memory and "
            "non_blocking=True, if the copies take time)",
        ),
        main,
        rows,
        "with only what this step reads on the GPU",
        sizes=_sizes(moment, rows),
    )


def _kept_by_views(moment: Moment, rows: list[int]) -> Excess:
    main = max(rows, key=lambda row: moment.size[row])
    return Excess(
        Answer(
            "view-keeps-base",
            f"only {_share(moment, rows)}{of_names(moment, rows)} from {moment.place(main)} are "
            "read: views of a part keep the whole",
            "clone the view: its memory is then all that is kept",
            code=".clone()",
            edit=EditKind.CLONE,
        ),
        main,
        rows,
        "with only what is read",
        sizes=_sizes(moment, rows),
    )


def _computed_in_whole(moment: Moment, rows: list[int]) -> Excess:
    main = max(rows, key=lambda row: moment.size[row])
    return Excess(
        Answer(
            "computed-in-whole",
            f"only {_share(moment, rows)}{of_names(moment, rows)} from {moment.place(main)} are "
            "read: the rest is computed and thrown away",
            "select the part before this operator instead of after it: of logits, the hidden "
            "states of the last position only",
        ),
        main,
        rows,
        "with only what is read",
        sizes=_sizes(moment, rows),
    )


def _rows_thrown_away(moment: Moment) -> Iterator[Excess]:
    """Large blocks whose rows each give one value, of which a part is read."""
    read, requested = moment.column("read"), moment.ledger.requested
    for small in range(len(moment.ledger)):
        if not 0 < read[small] <= _MOST * requested[small] or moment.category(small) in STATE:
            continue
        if moment.text("made_name", small) not in _ROW_WISE:
            continue
        group = {small}
        row: int | None = moment.source(small)
        while row is not None and requested[row] > requested[small]:
            group.add(row)
            if moment.text("made_name", row) not in _ROW_WISE and (
                moment.how(row) is not Made.POINTWISE
            ):
                break
            row = moment.source(row)
        ready = [one for one in group if one != small]
        while ready:
            for product in moment.products.get(ready.pop(), ()):
                if product not in group and 2 * requested[product] >= max(
                    requested[one] for one in group
                ):
                    group.add(product)
                    ready.append(product)
        alive = [one for one in group if one in moment.needs]
        if not alive:
            continue
        group |= moment.internals(group)
        share = read[small] / requested[small]
        main = max(
            (one for one in alive if not moment.text("made_phase", one).startswith("backward")),
            key=lambda one: moment.size[one],
            default=alive[0],
        )
        yield Excess(
            Answer(
                "computed-in-whole",
                f"{human_bytes(moment.bytes_of(alive))}{of_names(moment, alive)} from "
                f"{moment.place(main)} are rows of which {share:.0%} are read at the end "
                f"({moment.last_place(small) or moment.place(small)})",
                "select the rows before this operator instead of after it: of logits, those of the "
                "completion only",
            ),
            main,
            alive,
            "with only the rows that are read",
            sizes={one: int(moment.size[one] * share) for one in moment.alike(group)},
        )
        return
