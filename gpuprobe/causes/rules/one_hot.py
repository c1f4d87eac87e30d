"""One-hot vectors: an element for each class, where the class's index is enough."""

from __future__ import annotations

from collections.abc import Iterator

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
    roots = [
        row
        for row, inputs in enumerate(live.column("inputs"))
        if inputs and requested[row] >= 4 * inputs and live.text("made_name", row) == _SCATTER
    ]
    group, labels = set(roots), set(roots)
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
    indices = live.column("inputs")[roots[0]]
    fix = (
        "use class indices instead of one-hot labels: torch.nn.functional.cross_entropy and "
        "nll_loss take them"
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
