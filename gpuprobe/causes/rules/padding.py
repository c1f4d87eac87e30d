"""Batches that are padded further than their longest row."""

from __future__ import annotations

from collections.abc import Iterator

from gpuprobe.causes.answer import Answer
from gpuprobe.causes.live_memory import Excess, LiveMemory
from gpuprobe.causes.wording import of_names
from gpuprobe.model.text import human_bytes

_LEAST = 0.25


def diagnose(live: LiveMemory) -> Iterator[Excess]:
    """Integers that were copied to the GPU with the same end in each row, and what is computed from
    them."""
    padded, requested = live.column("padded"), live.ledger.requested
    graph, widths = live.column("graph"), live.column("width")
    for batch in range(len(padded)):
        if padded[batch] < _LEAST * requested[batch] or not graph[batch] or not widths[batch]:
            continue
        numbers = requested[batch] // widths[batch]
        rows = [
            row
            for row in range(len(padded))
            if requested[row] > requested[batch]
            and widths[row]
            and requested[row] // widths[row] % numbers == 0
            and (graph[row] == graph[batch] or live.in_backward(row))
        ]
        here = [row for row in live.rows if row in set(rows)]
        if not here:
            continue
        share = padded[batch] / requested[batch]
        forward = [row for row in here if graph[row] == graph[batch]]
        main = live.largest(forward or here)
        yield Excess(
            Answer(
                "padding",
                f"{share:.0%} of {human_bytes(live.bytes_of(here))} from {live.place(main)} "
                f"are computed from padding: the last {share:.0%} of each row of the batch"
                f"{of_names(live, [batch])} are the same number",
                "pad to the longest row of the batch, not to a maximum that none has",
            ),
            main,
            here,
            "with batches that are padded to the longest row",
            sizes={row: int(live.size[row] * (1 - share)) for row in rows},
        )
        return
