"""One-hot vectors: an element for each class, where the class's index is enough."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from gpuprobe.causes.answer import Answer
from gpuprobe.causes.live_memory import Excess, LiveMemory
from gpuprobe.causes.wording import of_names
from gpuprobe.model.text import human_bytes
from gpuprobe.model.trace import Made

_SCATTER = "scatter_"
_PRODUCTS = frozenset(("mm", "bmm", "addmm"))


def diagnose(live: LiveMemory) -> Iterator[Excess]:
    """Constants with one value scattered by indices, and what is computed from them."""
    requested = live.ledger.requested
    of_indices = {
        row: inputs
        for row, inputs in enumerate(live.column("inputs"))
        if inputs and requested[row] >= 4 * inputs and live.text("made_name", row) == _SCATTER
    }
    compared = _compared(live)
    of_indices |= compared
    roots = list(of_indices)
    group, labels = set(roots), set(roots)
    group |= {part for row in compared for part in live.parts(row)}
    ready = list(roots)
    while ready:
        row = ready.pop()
        for product in live.products.get(row, ()):
            how = live.how(product)
            if product in group or how not in (Made.COPY, Made.POINTWISE):
                continue
            if 4 * requested[product] >= requested[row]:
                group.add(product)
                if how is Made.COPY:
                    labels.add(product)
                    ready.append(product)
    rows = [row for row in live.rows if row in group]
    if not rows:
        return
    main = max(
        (row for row in labels if row in live.needs),
        key=lambda row: live.size[row],
        default=rows[0],
    )
    indices = of_indices[roots[0]]
    fix = (
        "use class indices instead of one-hot labels: torch.nn.functional.cross_entropy and "
        "nll_loss take them; gather selects each one's class, scatter_add and torch.bincount sum "
        "by class"
    )
    names = {live.text(name, row) for row in labels for name in ("first_name", "last_name")}
    if names & _PRODUCTS:
        fix = (
            "use the indices instead of a product with one-hot vectors: tensor[indices] selects "
            "rows, index_add_ and torch.bincount sum by index"
        )
    yield Excess(
        Answer(
            "one-hot",
            f"{human_bytes(live.bytes_of(rows))}{of_names(live, [main])} are one-hot vectors "
            f"from {live.place(main)}, and what is computed from them: the indices are "
            f"{human_bytes(indices)}",
            fix,
        ),
        main,
        rows,
        "without the one-hot vectors",
        sizes=dict.fromkeys(group, 0),
    )


def _compared(live: LiveMemory) -> dict[int, int]:
    """By row, the bytes of the indices that all classes were compared with: at once, or one after
    the other, and joined.
    """
    requested, width = live.ledger.requested, live.column("width")
    compared = {}
    for row in range(len(live.ledger)):
        name = live.text("made_name", row)
        if name == "eq":
            indices, count = live.source(row), 1
        elif name in _JOINS:
            parts = list(live.parts(row))
            of_parts = {_indices_of(live, part) for part in parts}
            indices, count = of_parts.pop() if len(of_parts) == 1 else None, len(parts)
        else:
            continue
        if indices is None or width[indices] != _INDEX or not width[row]:
            continue
        classes = requested[row] // width[row] // max(1, requested[indices] // _INDEX)
        if classes >= _LEAST_CLASSES and count in (1, classes):
            compared[row] = requested[indices]
    return compared


def _indices_of(live: LiveMemory, row: int) -> int | None:
    """What a row was computed from by a comparison of its size."""
    for one in (row, *live.sources(row)):
        if live.text("made_name", one) == "eq":
            return live.source(one)
        if live.how(one) not in (Made.COPY, Made.POINTWISE):
            return None
    return None


_JOINS: Final = frozenset(("cat", "stack"))
_INDEX: Final = 8
"""The bytes of an index: torch's have 64 bits."""
_LEAST_CLASSES: Final = 4
