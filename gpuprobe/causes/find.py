"""The causes of the memory at a peak that is not needed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from gpuprobe.analysis.peak.needs import Biographies
from gpuprobe.causes.answer import Answer
from gpuprobe.causes.groups import HeldBlock, HeldGroup, blocks_at, groups_of, tensors_at
from gpuprobe.causes.rules import RULES, exceptions
from gpuprobe.model.needs import Need
from gpuprobe.model.run.holders import Holder

LEAST_EFFECT = 0.05
"""The share of the tensors at the peak that a remedy has to save: other memory may be as high a
moment later."""


class Diagnosed(NamedTuple):
    """A group of memory, and the answer of the first rule that knows it."""

    group: HeldGroup
    diagnosis: Answer
    freed_early: int
    """The most memory in the trace, in bytes, if the group were freed after its last use."""


def causes_at(
    lives: Biographies,
    event: int,
    holders: Mapping[int, Holder],
    *,
    failed: bool = False,
    otherwise: Callable[[HeldGroup], Answer | None] | None = None,
) -> Iterator[Diagnosed]:
    """The causes of memory just after an event, the most memory first. ``holders``: what holds the
    blocks, by row of the ledger. ``failed``: memory ran out here, so what the program would have
    used later is unknown: only what its exception holds is a cause. ``otherwise``: one more rule,
    the last.
    """
    blocks = blocks_at(lives, event, failed=failed)
    peak = max(lives.ledger.allocated_after())
    rules = (exceptions.diagnose,) if failed else RULES
    last = () if otherwise is None else (otherwise,)
    for group in groups_of(blocks, holders, tensors_at(lives, event)):
        for rule in (*rules, *last):
            diagnosis = rule(group)
            if diagnosis is not None:
                if diagnosis.rule:
                    found = Diagnosed(group, diagnosis, _without(lives, group.blocks))
                    if failed or peak - found.freed_early >= LEAST_EFFECT * group.tensors:
                        yield found
                break


def _without(lives: Biographies, blocks: tuple[HeldBlock, ...]) -> int:
    """The most memory in the trace if these blocks, and all others from the same places in the
    program, were freed after their last use, and made no earlier than the step of their first one.
    """
    ledger = lives.ledger
    ends = list(ledger.freed)
    early = lives.ends_of_use()
    places = {ledger.stack[block.row] for block in blocks}
    for row, stack in enumerate(ledger.stack):
        if stack in places:
            ends[row] = early[row]
    for block in blocks:
        ends[block.row] = early[block.row]
        if block.need is Need.NOT_YET and block.last_use is None:
            ends[block.row] = ledger.start[block.row]
    return max(ledger.running(ends))
