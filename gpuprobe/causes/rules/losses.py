"""Graphs of several losses that are alive until one backward pass of their sum."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from gpuprobe.causes.answer import Answer
from gpuprobe.causes.live_memory import Excess, LiveMemory
from gpuprobe.causes.wording import of_names
from gpuprobe.model.causes import Bound
from gpuprobe.model.memory import Category
from gpuprobe.model.text import human_bytes


def diagnose(live: LiveMemory) -> Iterator[Excess]:
    """What was saved by the same lines for graphs that only a sum of numbers connects. In a
    pipeline, each of them waits for its gradient from another rank. What begins in an earlier step,
    such as a generator before the step of the discriminator, connects graphs as well: its backward
    pass can run once only.
    """
    if _sends(live) or _begins_earlier(live):
        return
    numbers = live.column("graph")
    graphs: dict[int, list[int]] = {}
    for row in live.rows:
        forward = not live.in_backward(row)
        if numbers[row] and forward and live.for_backward(row):
            graphs.setdefault(numbers[row], []).append(row)
    lines = {number: {live.kinds[row] for row in rows} for number, rows in graphs.items()}
    alike = [
        number
        for number in graphs
        if any(
            2 * len(lines[number] & lines[other]) >= len(lines[number])
            for other in graphs
            if other != number
        )
    ]
    if len(alike) < 2:
        return
    rows = [row for number in alike for row in graphs[number]]
    largest = max(alike, key=lambda number: live.bytes_of(graphs[number]))
    main = live.largest(graphs[largest])
    size = human_bytes(live.bytes_of(rows))
    called = live.called_at(rows)
    at = f", called at {called}," if called is not None and called != live.place(main) else ","
    yield Excess(
        Answer(
            "summed-losses",
            f"{size}{of_names(live, rows)} from {live.place(main)} are the graphs of "
            f"{len(alike)} forward passes{at} which are alive at once because only the sum of "
            "their losses has a backward pass",
            "call backward for each loss, as soon as it is computed: gradients add up",
            code="loss.backward()",
        ),
        main,
        rows,
        "with one of the graphs at a time",
        sizes={row: 0 for row in rows if row not in graphs[largest]},
        kept_at=called,
        bound=Bound.OR_LESS,  # the gradients of one loss are computed at a time, too
    )


def _begins_earlier(live: LiveMemory) -> bool:
    """Whether the backward pass reads what was computed before the step."""
    return any(
        row >= live.ledger.made
        and live.for_backward(row)
        and live.category(row) is Category.ACTIVATION
        for row in live.rows
    )


def _sends(live: LiveMemory) -> bool:
    """Whether the program sends tensors to another rank."""
    strings = live.ledger.trace.stacks.strings
    codes = {*live.column("made_name"), *live.column("last_name")}
    return any(strings[code] in _MESSAGES for code in codes)


_MESSAGES: Final = frozenset(("send", "recv_"))
