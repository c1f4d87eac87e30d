"""Values in a wider type than they need: results that are wider than what they are made of, and
tensors that are only there to be converted to a narrower type.
"""

from __future__ import annotations

from collections.abc import Iterator

from gpuprobe.causes.answer import Answer
from gpuprobe.causes.moment import STATE, Excess, Moment
from gpuprobe.causes.wording import of_names
from gpuprobe.model.memory import Category
from gpuprobe.model.text import human_bytes
from gpuprobe.model.trace import Made

_PRECISE = frozenset(
    ("_log_softmax", "_softmax", "norm", "linalg_vector_norm", "native_layer_norm", "mean", "sum")
)
"""Operators that are computed in float32 for their precision."""


def diagnose(moment: Moment) -> Iterator[Excess]:
    """Wider copies without a use that needs them, and copies of a type that is given up."""
    yield from _widened(moment)
    yield from _narrowed_later(moment)


def _widened(moment: Moment) -> Iterator[Excess]:
    widths = moment.column("width")
    rows = []
    for row in moment.rows:
        source = moment.source(row)
        if source is None or moment.how(row) not in (Made.COPY, Made.POINTWISE):
            continue
        if not widths[source] or widths[row] <= widths[source] or widths[source] < 2:
            continue
        same = moment.ledger.requested[row] * widths[source] == (
            moment.ledger.requested[source] * widths[row]
        )
        if same and not moment.lives.survives(row) and not _needs_precision(moment, row):
            rows.append(row)
    if not rows:
        return
    main = max(rows, key=lambda row: moment.size[row])
    sources = [source for source in map(moment.source, rows) if source in moment.needs]
    held = [source for source in sources if source is not None]
    yield Excess(
        Answer(
            "widened",
            f"{human_bytes(moment.bytes_of(rows))}{of_names(moment, [*rows, *held])} are wider "
            f"copies: {moment.place(main)} converts elements of "
            f"{widths[moment.source(main) or 0]} bytes to {widths[main]}, and nothing that follows "
            "needs them so",
            "do not widen where there is no loss: compute in the type of the model, and convert "
            "only what a loss or a sum is computed from",
        ),
        main,
        rows,
        "without the conversion",
        sizes=dict.fromkeys(moment.alike(rows), 0),
    )


def _needs_precision(moment: Moment, row: int) -> bool:
    if moment.for_backward(row):
        return True
    products = moment.products.get(row, ())
    return any(moment.text("made_name", one) in _PRECISE for one in products)


def _narrowed_later(moment: Moment) -> Iterator[Excess]:
    widths, lives = moment.column("width"), moment.lives
    rows: dict[int, int] = {}
    for row in moment.rows:
        to = moment.copied_to(row)
        if to is None or moment.category(row) in STATE - {Category.PARAMETER, Category.BUFFER}:
            continue
        only = lives.first[row] == lives.last[row] and lives.made[to] == lives.last[row]
        if only and 0 < widths[to] < widths[row] and lives.last[row] >= moment.now:
            rows[row] = moment.size[to]
    if not rows:
        return
    main = max(rows, key=lambda row: moment.size[row])
    to = moment.copied_to(main)
    where = moment.last_place(main)
    yield Excess(
        Answer(
            "narrowed-later",
            f"{human_bytes(moment.bytes_of(rows))}{of_names(moment, rows)} from "
            f"{moment.place(main)} are only converted to a type of {widths[to or 0]} instead of "
            f"{widths[main]} bytes, at {where}",
            "make them in the type in which they are used: a model is built, or converted with "
            ".half(), before moving it to the GPU",
        ),
        main,
        list(rows),
        "in the type to which they are converted",
        sizes={
            **rows,
            **{row: 0 for row in moment.rows if row in {moment.copied_to(r) for r in rows}},
        },
    )
