"""Tensors that autograd saves though the backward pass of their operator reads their shape only."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from gpuprobe.causes.answer import Answer
from gpuprobe.causes.live_memory import Excess, LiveMemory
from gpuprobe.causes.wording import for_variable
from gpuprobe.model.place import Place
from gpuprobe.model.text import human_bytes

_SAVERS: Final = frozenset(("index_add", "index_copy", "put"))
"""Operators whose backward formula has the shape of ``source``, for which it saves it whole: read
in PyTorch's ``derivatives.yaml`` (``.expand_as(source)``, ``.reshape_as(source)``)."""


def diagnose(live: LiveMemory) -> Iterator[Excess]:
    """Blocks that such an operator was the last to read, and that a backward pass frees."""
    rows = [
        row
        for row in live.rows
        if live.needs[row].needless
        and live.text("last_name", row).rstrip("_") in _SAVERS
        and not live.text("last_phase", row).startswith("backward")
        and live.lives.freed_in_backward(row)
    ]
    if not rows:
        return
    main = live.largest(rows)
    name, at = live.text("last_name", main), live.last_place(main)
    yield Excess(
        Answer(
            "saved-unread",
            f"{human_bytes(live.bytes_of(rows))}{for_variable(live, main)} from "
            f"{live.place(main)} are kept by the autograd graph: {name} at {at} saves what it adds "
            "for its backward pass, which reads only its shape",
            "use an operator that saves indices only: scatter_add_ with index.view(-1, 1)"
            ".expand_as(source) instead of index_add_; or, for sums over edges of a graph, a "
            "product with a sparse matrix (torch.sparse.mm), which makes no tensor of all edges, "
            "or sums in chunks of edges",
        ),
        main,
        rows,
        "without what is saved",
        ends={row: live.end_after(live.lives.last[row]) for row in live.alike(rows)},
        kept_at=at if isinstance(at, Place) else None,
    )
