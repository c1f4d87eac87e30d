"""What torch.vmap computes for all examples at once."""

from __future__ import annotations

from collections.abc import Iterator

from gpuprobe.causes.answer import Answer, EditKind
from gpuprobe.causes.moment import STATE, Excess, Moment
from gpuprobe.model.text import human_bytes

_VMAP = "torch/_functorch/vmap.py"
_CHUNKS = 8


def diagnose(moment: Moment) -> Iterator[Excess]:
    """Intermediate results inside of a vmap that is not chunked."""
    rows = []
    for row in moment.rows:
        functions = moment.functions(row, _VMAP)
        if not functions or any(name.startswith("_chunked") for name in functions):
            continue
        if moment.category(row) not in STATE or moment.is_temporary(row):
            rows.append(row)
    if not rows:
        return
    main = max(rows, key=lambda row: moment.size[row])
    yield Excess(
        Answer(
            "whole-vmap",
            f"{human_bytes(moment.bytes_of(rows))} from {moment.place(main)} are computed by vmap "
            "for all examples at once",
            "let vmap compute them in chunks: chunk_size=...",
            code="torch.vmap(function, chunk_size=32)",
            edit=EditKind.CHUNK_SIZE,
        ),
        main,
        rows,
        f"in {_CHUNKS} chunks",
        sizes={row: moment.size[row] // _CHUNKS for row in moment.alike(rows)},
    )
