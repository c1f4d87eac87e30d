"""Values in a wider type than they need: results that are wider than what they are made of, and
tensors that are only there to be converted to a narrower type.
"""

from __future__ import annotations

from collections.abc import Iterator

from gpuprobe.causes.answer import Answer
from gpuprobe.causes.live_memory import STATE, Excess, LiveMemory
from gpuprobe.causes.wording import of_names
from gpuprobe.model.causes import Bound
from gpuprobe.model.memory import Category
from gpuprobe.model.needs import Need
from gpuprobe.model.run.holders import Kept
from gpuprobe.model.text import human_bytes
from gpuprobe.model.trace import Made

_PRECISE = frozenset(
    ("_log_softmax", "_softmax", "norm", "linalg_vector_norm", "native_layer_norm", "mean", "sum")
)
"""Operators that are computed in float32 for their precision."""
_MATRIX_PRODUCTS = frozenset(("mm", "addmm", "bmm", "convolution"))
_NEEDLESS = "nothing that follows needs them so"


def diagnose(live: LiveMemory) -> Iterator[Excess]:
    """Wider copies without a use that needs them, and copies of a type that is given up."""
    yield from _widened(live)
    yield from _narrowed_later(live)


def _is_wider(live: LiveMemory, row: int) -> bool:
    """Whether it has as many elements as what it is computed from, in a wider type."""
    widths, requested, source = live.column("width"), live.ledger.requested, live.source(row)
    if source is None or live.how(row) not in (Made.COPY, Made.POINTWISE):
        return False
    if not widths[source] or widths[row] <= widths[source] or widths[source] < 2:
        return False
    return requested[row] * widths[source] == requested[source] * widths[row]


def kept_wide(live: LiveMemory) -> Iterator[Excess]:
    """Wider copies that a name keeps after what they were made for, such as a loss."""
    rows = [
        row
        for row in live.rows
        if live.needs[row].needless
        and live.how(row) is Made.COPY
        and live.category(row) not in STATE
        and live.text("last_name", row) in _PRECISE
        and _is_wider(live, row)
        and (holder := live.holders.get(row)) is not None
        and holder.name
        and holder.kept is Kept.TENSOR
    ]
    if rows:
        main, widths = live.largest(rows), live.column("width")
        name = live.text("last_name", main)
        yield Excess(
            Answer(
                "widened",
                f"{human_bytes(live.bytes_of(rows))}{of_names(live, rows)} are copies in a type of "
                f"{widths[main]} bytes, allocated at {live.place(main)} and not used again: only "
                f"{name} at {live.last_place(main)} needed that",
                "convert in the call that needs it, as in cross_entropy(logits.float(), targets), "
                "so that no name keeps the wide copy: widen only what a loss or a sum is computed "
                "from, where it is",
            ),
            main,
            rows,
            "without the wider copy after its last use",
            ends={row: live.end_after(live.lives.last[row]) for row in live.alike(rows)},
            bound=Bound.OR_MORE,  # the name may keep the narrower one instead
        )


def _widened(live: LiveMemory) -> Iterator[Excess]:
    widths = live.column("width")
    rows = [
        row
        for row in live.rows
        if _is_wider(live, row) and not (live.lives.survives(row) or _needs_precision(live, row))
    ]
    if not rows:
        return
    main = live.largest(rows)
    sources = [source for source in map(live.source, rows) if source in live.needs]
    held = [source for source in sources if source is not None]
    multiplied = live.for_backward(main)
    yield Excess(
        Answer(
            "widened",
            f"{human_bytes(live.bytes_of(rows))}{of_names(live, [*rows, *held])} are wider "
            f"copies: {live.place(main)} converts elements of "
            f"{widths[live.source(main) or 0]} bytes to {widths[main]}, and "
            + ("the product of them is narrowed again" if multiplied else _NEEDLESS),
            ("make the weights that they are multiplied with of the model's type: " * multiplied)
            + "compute in the type of the model, and widen only what a loss or a sum "
            "is computed from",
        ),
        main,
        rows,
        "without the conversion",
        sizes={row: _narrow(live, row) if multiplied else 0 for row in live.alike(rows)},
    )


def _narrow(live: LiveMemory, row: int) -> int:
    """The bytes that are saved for a product in the type before a copy: none in addition, if these
    values are saved already.
    """
    source = live.source(row)
    if source is None or live.needs.get(source) in (Need.LATER, Need.IN_USE):
        return 0
    widths = live.column("width")
    return live.size[row] * widths[source] // widths[row]


def _needs_precision(live: LiveMemory, row: int) -> bool:
    if live.for_backward(row):
        return not _narrowed_products(live, row)
    products = live.products.get(row, ())
    return any(live.text("made_name", one) in _PRECISE for one in products)


def _narrowed_products(live: LiveMemory, row: int) -> bool:
    """Whether matrix products alone read a copy in the forward pass, and what comes of them is
    narrowed to the type before the copy: weights of a wider type.
    """
    widths, source = live.column("width"), live.source(row)
    ready, narrowed = [row], False
    for one in ready:  # which grows
        for product in live.products.get(one, ()):
            if live.in_backward(product):
                continue
            if live.text("made_name", product) in _MATRIX_PRODUCTS:
                ready.append(product)
            elif one != row and source is not None and live.how(product) is Made.COPY:
                narrowed = narrowed or widths[product] == widths[source]
            else:
                return False
    return narrowed


def _narrowed_later(live: LiveMemory) -> Iterator[Excess]:
    widths, lives = live.column("width"), live.lives
    rows: dict[int, int] = {}
    for row in live.rows:
        to = live.copied_to(row)
        if to is None or live.category(row) in STATE - {Category.PARAMETER, Category.BUFFER}:
            continue
        only = lives.first[row] == lives.last[row] and lives.made[to] == lives.last[row]
        if only and 0 < widths[to] < widths[row] and lives.last[row] >= live.now:
            rows[row] = live.size[to]
    if not rows:
        return
    main = live.largest(rows)
    to = live.copied_to(main)
    where = live.last_place(main)
    yield Excess(
        Answer(
            "narrowed-later",
            f"{human_bytes(live.bytes_of(rows))}{of_names(live, rows)} from "
            f"{live.place(main)} are only converted to a type of {widths[to or 0]} instead of "
            f"{widths[main]} bytes, at {where}",
            "make them in the type in which they are used: a model is built, or converted with "
            ".half(), before moving it to the GPU",
        ),
        main,
        list(rows),
        "in the type to which they are converted",
        sizes={
            **rows,
            **{row: 0 for row in live.rows if row in {live.copied_to(r) for r in rows}},
        },
    )
