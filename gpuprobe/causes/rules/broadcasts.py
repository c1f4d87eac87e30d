"""Results of broadcasting that are far larger than what they are computed from, and than what is
made of them: differences or products of all pairs.
"""

from __future__ import annotations

from collections.abc import Iterator

from gpuprobe.causes.answer import Answer
from gpuprobe.causes.live_memory import Excess, LiveMemory
from gpuprobe.causes.wording import of_names, saved_by
from gpuprobe.model.causes import Bound
from gpuprobe.model.text import human_bytes
from gpuprobe.model.trace import Made

_FACTOR = 4
_CHUNKS = 8


def _reduced_in_place(live: LiveMemory, row: int) -> int:
    """The bytes that remain of a larger tensor of the same size to which a row is added in place,
    and of which only a small part, or none, is read later; 0 if it is not.
    """
    if not live.text("last_name", row).endswith("_") or live.results(row):
        return 0
    into = [
        one
        for one in live.rows
        if live.ledger.requested[one] == live.ledger.requested[row]
        and live.lives.made[one] < live.lives.last[row] < live.lives.last[one]
        and live.is_temporary(one)
    ]
    last = [live.made_by.get(live.lives.last[one]) for one in into]
    small = [one for one in last if one is not None]
    if len(small) < len(into) or not into:
        return 0
    most = max(live.ledger.requested[one] for one in small)
    return most if _FACTOR * most <= live.ledger.requested[row] else 0


def diagnose(live: LiveMemory) -> Iterator[Excess]:
    """Element-wise results of at least four times their inputs that are reduced again."""
    requested, inputs = live.ledger.requested, live.column("inputs")
    roots = [
        row
        for row in range(len(inputs))
        if inputs[row]
        and live.how(row) is Made.POINTWISE
        and requested[row] >= _FACTOR * inputs[row]
    ]
    forward = [row for row in roots if not live.text("made_phase", row).startswith("backward")]
    group, reduced = set(roots), 0
    ready = list(roots)
    while ready:
        row = ready.pop()
        for product in live.results(row):
            if live.how(product) is Made.POINTWISE and 2 * requested[product] >= requested[row]:
                if product not in group:
                    group.add(product)
                    ready.append(product)
            elif live.how(product) is Made.OTHER and _FACTOR * requested[product] <= requested[row]:
                reduced = max(reduced, requested[product])
        reduced = max(reduced, _reduced_in_place(live, row))
    rows = [row for row in live.rows if row in group]
    if not rows or not reduced or not forward:
        return
    main = max(forward, key=lambda row: (live.size[row], row in live.needs, -live.lives.made[row]))
    pairs = [row for row in sorted(live.operands(main)) if row in live.needs]
    of_pairs = of_names(live, pairs) if pairs else ""
    saved = saved_by(live, rows)
    chunks = "in chunks"
    if saved:  # otherwise the graph keeps those of all chunks
        chunks += ", each under torch.utils.checkpoint.checkpoint"
    yield Excess(
        Answer(
            "broadcast-intermediate",
            f"{human_bytes(live.bytes_of(rows))}{of_names(live, rows)} are combinations of all "
            f"pairs{of_pairs}: {live.text('made_name', main)} at {live.place(main)} makes "
            f"{human_bytes(requested[main])} of {human_bytes(inputs[main])}, of which "
            f"{human_bytes(reduced)} remain{saved}",
            f"compute it {chunks}, or without the pairs: a square by norms and a matrix product "
            "(torch.cdist), a cosine similarity as a matrix product of normalized rows",
        ),
        main,
        rows,
        f"in chunks of an eighth ({_CHUNKS} of them, none saved for a backward pass)",
        sizes={row: live.size[row] // _CHUNKS for row in group},
        named=pairs,
        bound=Bound.OR_LESS,  # a matrix product has no pairs at all
    )
