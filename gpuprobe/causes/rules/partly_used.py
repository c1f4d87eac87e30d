"""Blocks of which operators read a small part: a view that keeps its base, logits of a whole
sequence for its last token, a data set on the GPU.
"""

from __future__ import annotations

from collections.abc import Iterator

from gpuprobe.causes.answer import Answer, EditKind
from gpuprobe.causes.live_memory import STATE, Excess, LiveMemory
from gpuprobe.causes.wording import of_names
from gpuprobe.model.causes import Bound
from gpuprobe.model.text import human_bytes
from gpuprobe.model.trace import Made

_MOST = 0.5
_SOON = 3
"""Operators within which a part of a new block is used, at most. Kept views wait longer."""
_ROW_WISE = frozenset(("_log_softmax", "_softmax", "gather", "squeeze", "log_softmax", "softmax"))


def diagnose(live: LiveMemory) -> Iterator[Excess]:
    """Blocks that are read in half or less."""
    read = live.column("read")
    partly = [
        row
        for row in live.rows
        if 0 < read[row] <= _MOST * live.ledger.requested[row]
        and live.category(row) not in STATE
        and not live.needs[row].needless
    ]
    whole = [row for row in partly if _stays(live, row)]
    if whole:
        yield _data_set(live, whole)
    now = [row for row in partly if row not in whole and live.lives.last[row] >= live.now]
    new = [row for row in now if live.now - live.lives.made[row] <= _SOON]
    old = [row for row in now if row not in new]
    if new and not live.bytes_of(old) > live.bytes_of(new):
        yield _computed_in_whole(live, new)
    elif old:
        yield _kept_by_views(live, [*old, *new])
    yield from _rows_thrown_away(live)


def _stays(live: LiveMemory, row: int) -> bool:
    """Whether it is older than the step, and used in later ones."""
    return row >= live.ledger.made and live.lives.survives(row)


def _sizes(live: LiveMemory, rows: list[int]) -> dict[int, int]:
    read = live.column("read")
    return {row: read[row] for row in live.alike(rows) if read[row]}


def _what(live: LiveMemory, rows: list[int]) -> str:
    """How much of which memory is read, to begin a sentence."""
    read = sum(live.column("read")[row] for row in rows)
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
        f"{_what(live, rows)} are read in a step: the rest waits on the GPU for other steps",
        "keep it on the CPU, and move each batch when it is used (with pinned memory and "
        "non_blocking=True, if the copies take time)",
    )
    # What the step selects of it is the batch then.
    return _excess(live, rows, answer, Bound.OR_LESS, "with only what this step reads on the GPU")


def _kept_by_views(live: LiveMemory, rows: list[int]) -> Excess:
    answer = Answer(
        "view-keeps-base",
        f"only {_what(live, rows)} are read: views of a part keep the whole",
        "clone the view: its memory is then all that is kept",
        code=".clone()",
        edit=EditKind.CLONE,
    )
    return _excess(live, rows, answer, Bound.OR_MORE)  # the base is there until it is cloned


def _computed_in_whole(live: LiveMemory, rows: list[int]) -> Excess:
    answer = Answer(
        "computed-in-whole",
        f"only {_what(live, rows)} are read: the rest is computed and thrown away",
        "select the part before this operator instead of after it: of logits, the hidden states "
        "of the last position only",
    )
    return _excess(live, rows, answer, Bound.OR_LESS)  # what is computed from it is smaller, too


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
            (one for one in alive if not live.text("made_phase", one).startswith("backward")),
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
