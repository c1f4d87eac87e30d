"""Results of broadcasting that are far larger than what they are computed from, and than what is
made of them: differences or products of all pairs.
"""

from __future__ import annotations

from collections.abc import Iterator

from gpuprobe.causes.answer import Answer
from gpuprobe.causes.moment import Excess, Moment
from gpuprobe.causes.wording import of_names, saved_by
from gpuprobe.model.text import human_bytes
from gpuprobe.model.trace import Made

_FACTOR = 4
_CHUNKS = 8


def diagnose(moment: Moment) -> Iterator[Excess]:
    """Element-wise results of at least four times their inputs that are reduced again."""
    requested, inputs = moment.ledger.requested, moment.column("inputs")
    roots = [
        row
        for row in range(len(inputs))
        if inputs[row]
        and moment.how(row) is Made.POINTWISE
        and requested[row] >= _FACTOR * inputs[row]
    ]
    forward = [row for row in roots if not moment.text("made_phase", row).startswith("backward")]
    group, reduced = set(roots), 0
    ready = list(roots)
    while ready:
        row = ready.pop()
        for product in moment.products.get(row, ()):
            if moment.how(product) is Made.POINTWISE and 2 * requested[product] >= requested[row]:
                if product not in group:
                    group.add(product)
                    ready.append(product)
            elif (
                moment.how(product) is Made.OTHER and _FACTOR * requested[product] <= requested[row]
            ):
                reduced = max(reduced, requested[product])
    rows = [row for row in moment.rows if row in group]
    if not rows or not reduced or not forward:
        return
    main = max(forward, key=lambda row: (moment.size[row], row in moment.needs, row))
    yield Excess(
        Answer(
            "broadcast-intermediate",
            f"{human_bytes(moment.bytes_of(rows))}{of_names(moment, rows)} are combinations of all "
            f"pairs: {moment.text('made_name', main)} at {moment.place(main)} makes "
            f"{human_bytes(requested[main])} of {human_bytes(inputs[main])}, of which "
            f"{human_bytes(reduced)} remain{saved_by(moment, rows)}",
            "compute it in chunks, or without the pairs: a square by norms and a matrix product "
            "(torch.cdist), a cosine similarity as a matrix product of normalized rows",
        ),
        main,
        rows,
        f"in chunks of an eighth ({_CHUNKS} of them, none saved for a backward pass)",
        sizes={row: moment.size[row] // _CHUNKS for row in group},
    )
