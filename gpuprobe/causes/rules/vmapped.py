"""What torch.vmap computes for all examples at once."""

from __future__ import annotations

from collections.abc import Iterator

from gpuprobe.causes.answer import Answer, EditKind
from gpuprobe.causes.live_memory import STATE, Excess, LiveMemory
from gpuprobe.model.text import human_bytes

_VMAP = "torch/_functorch/vmap.py"
_CHUNKS = 8


def diagnose(live: LiveMemory) -> Iterator[Excess]:
    """Intermediate results inside of a vmap that is not chunked."""
    rows = []
    for row in live.rows:
        functions = live.functions(row, _VMAP)
        if not functions or any(name.startswith("_chunked") for name in functions):
            continue
        if live.category(row) not in STATE or live.is_temporary(row):
            rows.append(row)
    if not rows:
        return
    main = live.largest(rows)
    yield Excess(
        Answer(
            "whole-vmap",
            f"{human_bytes(live.bytes_of(rows))} from {live.place(main)} are computed by vmap "
            "for all examples at once",
            "let vmap compute them in chunks: chunk_size=...",
            code="torch.vmap(function, chunk_size=32)",
            edit=EditKind.CHUNK_SIZE,
        ),
        main,
        rows,
        f"in {_CHUNKS} chunks",
        sizes={row: live.size[row] // _CHUNKS for row in live.alike(rows)},
    )
