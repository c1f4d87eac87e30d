"""Tensors that are joined while their parts are alive, and tensors that grow by joining."""

from __future__ import annotations

from collections.abc import Iterator

from gpuprobe.causes.answer import Answer
from gpuprobe.causes.moment import Excess, Moment
from gpuprobe.causes.wording import of_names
from gpuprobe.model.text import human_bytes

_JOINS = ("cat", "stack")


def diagnose(moment: Moment) -> Iterator[Excess]:
    """Results of cat and stack that are alive together with their parts."""
    seen: set[int] = set()
    for row in sorted(moment.rows, key=lambda row: -moment.size[row]):
        if row in seen or moment.text("made_name", row) not in _JOINS:
            continue
        parts = [one for one in moment.rows if moment.copied_to(one) == row and one != row]
        both = min(moment.size[row], moment.bytes_of(parts))
        if not parts or 2 * both < moment.size[row]:
            continue
        largest = max(parts, key=lambda one: moment.size[one])
        if moment.ledger.stack[largest] == moment.ledger.stack[row]:
            yield _grown(moment, row, seen)
        else:
            yield _joined(moment, row, parts)
        seen.add(row)


def _grown(moment: Moment, row: int, seen: set[int]) -> Excess:
    """A tensor that is joined with a new part in each pass of a loop."""
    names = moment.column("made_name")
    lines = {moment.ledger.stack[row]}
    now = [one for one in moment.rows if moment.text("made_name", one) in _JOINS]
    for one in now:  # keys, and values on the next line
        source = moment.source(one)
        if source is not None and moment.ledger.stack[source] == moment.ledger.stack[one]:
            lines.add(moment.ledger.stack[one])
    rows = [one for one in now if moment.ledger.stack[one] in lines]
    seen.update(rows)
    ends = {}
    read = False
    for one in range(len(moment.ledger)):
        if moment.ledger.stack[one] in lines and names[one]:
            to = moment.copied_to(one)
            if to is not None:
                ends[one] = moment.ledger.start[to]
                read = read or moment.lives.first[one] != moment.lives.last[one]
    size = human_bytes(moment.bytes_of(rows))
    remedy = (
        "preallocate it with its final size, and write each part into it"
        if read
        else "keep only what is read of it later, such as an argmax, or move each part to the CPU "
        "before keeping it in a list; or preallocate it"
    )
    return Excess(
        Answer(
            "grown-by-joining",
            f"{size}{of_names(moment, rows)} grow by {moment.text('made_name', row)} at "
            f"{moment.place(row)}: at each call the whole exists twice, and blocks of every size "
            "stay in the cache",
            remedy,
        ),
        row,
        rows,
        "with each part written into memory that is allocated once",
        ends=ends,
        sizes={} if not ends else {r: moment.size[r] for r in rows if r not in ends},
    )


def _joined(moment: Moment, row: int, parts: list[int]) -> Excess:
    kept = all(moment.lives.last[one] > moment.now for one in parts)
    remedy = (
        "work on the parts, or on one bounded bucket of them after the other"
        if kept
        else "write each part into a preallocated result as soon as it is computed"
    )
    return Excess(
        Answer(
            "joined-with-parts",
            f"{human_bytes(moment.size[row])}{of_names(moment, [row])} are joined by "
            f"{moment.text('made_name', row)} at {moment.place(row)} while the parts are alive"
            f"{of_names(moment, parts, ' in ')}: the same values twice",
            remedy,
        ),
        row,
        [row, *parts],
        "without the second copy",
        sizes={
            **dict.fromkeys(moment.alike([row]), 0),
            **{one: moment.size[one] for one in parts},
        },
    )
