"""Autocast's cache of converted weights."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from gpuprobe.causes.answer import Answer
from gpuprobe.causes.groups import HeldBlock, HeldGroup
from gpuprobe.causes.live_memory import Excess, LiveMemory
from gpuprobe.model.causes import Bound
from gpuprobe.model.memory import Category
from gpuprobe.model.run.holders import HolderRoot
from gpuprobe.model.text import human_bytes

_REMEDY = (
    "end the context after each forward pass, or do not cache: "
    "torch.autocast(..., cache_enabled=False)",
    'torch.autocast("cuda", cache_enabled=False)',
)


def diagnose(group: HeldGroup) -> Answer | None:
    """Converted weights that autocast caches until its outermost context ends."""
    holder = group.holder
    if holder is None or holder.root is not HolderRoot.AUTOCAST:
        return None
    return Answer(
        "autocast-cache",
        f"{human_bytes(group.bytes)} are weights that autocast has converted and keeps until its "
        "outermost context ends",
        *_REMEDY,
    )


def between_steps(live: LiveMemory) -> Iterator[Excess]:
    """Converted weights of earlier steps that this step has used, if it does at all: a context
    around all steps keeps them until the next one.
    """
    rows = [row for row in converted(live) if _is_cached(live, row)]
    if not rows:
        return
    yield Excess(
        Answer(
            "autocast-cache",
            f"{human_bytes(live.bytes_of(rows))} are weights that autocast has converted in an "
            "earlier step and keeps until its outermost context ends, which is around several "
            "steps (changes of the weights since then are not in them)",
            *_REMEDY,
        ),
        live.largest(rows),
        rows,
        "without what is cached from an earlier step",
        sizes=dict.fromkeys(rows, 0),
        bound=Bound.OR_MORE,  # while a forward pass runs, it may need them
    )


def _is_cached(live: LiveMemory, row: int) -> bool:
    holder = live.holders.get(row)
    return holder is not None and holder.root is HolderRoot.AUTOCAST


def converted(live: LiveMemory) -> list[int]:
    """The rows that may be converted weights of an earlier step, which this one does not use again:
    they have the size of a weight in half precision.
    """
    requested = live.ledger.requested
    halves = {requested[row] // 2 for row in live.rows if live.category(row) is Category.PARAMETER}
    return [
        row
        for row in live.rows
        if row >= live.ledger.made
        and requested[row] in halves
        and live.category(row) is not Category.PARAMETER
        and live.lives.last[row] <= live.now
    ]


def without_cached(blocks: Collection[HeldBlock], cached: Collection[int]) -> list[HeldBlock]:
    """The blocks but for weights whose converted copies, in bytes ``cached``, are used instead."""
    return [
        block
        for block in blocks
        if block.category is not Category.PARAMETER or block.bytes // 2 not in cached
    ]
