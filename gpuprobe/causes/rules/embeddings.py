"""Dense gradients of embeddings of which a batch uses a few rows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from gpuprobe.causes.answer import Answer
from gpuprobe.causes.live_memory import Excess, LiveMemory
from gpuprobe.causes.wording import of_owner, parameters_like
from gpuprobe.model.text import human_bytes

_FACTOR: Final = 8
_DENSE: Final = "embedding_dense_backward"
_OF_WEIGHTS: Final = frozenset(("mm", "addmm", "bmm"))


def diagnose(live: LiveMemory) -> Iterator[Excess]:
    """Gradients of at least eight times what they are computed from: most of their rows are zeros.
    A weight that a matrix product uses, too, has a dense gradient in any case.
    """
    requested, inputs = live.ledger.requested, live.column("inputs")
    made = [live.text("made_name", row) for row in range(len(requested))]
    dense = {
        requested[row]
        for row, name in enumerate(made)
        if name in _OF_WEIGHTS and live.in_backward(row)
    }
    sparse = [
        row
        for row, name in enumerate(made)
        if name == _DENSE
        and 0 < _FACTOR * inputs[row] <= requested[row]
        and requested[row] not in dense
    ]
    rows = [row for row in live.rows if row in set(sparse)]
    if not rows:
        return
    main = live.largest(rows)
    yield Excess(
        Answer(
            "dense-embedding-gradient",
            f"{human_bytes(live.bytes_of(rows))} are dense gradients of an embedding"
            f"{of_owner(live, rows)}, {human_bytes(requested[main])} at {live.place(main)}: they "
            f"are computed from {human_bytes(inputs[main])}, and all other rows are zeros",
            "let the embedding have sparse gradients, nn.Embedding(..., sparse=True), with an "
            "optimizer that takes them (SGD, SparseAdam)",
            code="nn.Embedding(..., sparse=True)",
        ),
        main,
        rows,
        "with sparse gradients",
        sizes={row: inputs[row] for row in sparse},
        named=parameters_like(live, rows),
    )
