"""The causes of the memory at a peak that is not needed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from gpuprobe.analysis.peak.needs import Biographies
from gpuprobe.causes.answer import Answer
from gpuprobe.causes.groups import HeldBlock, HeldGroup, blocks_at, groups_of, tensors_at
from gpuprobe.causes.rules import RULES, exceptions
from gpuprobe.model.run.holders import Holder


class Diagnosed(NamedTuple):
    """A group of memory, and the answer of the first rule that knows it."""

    group: HeldGroup
    diagnosis: Answer
    freed_early: int
    """The most memory in the trace, in bytes, if the group were freed after its last use."""


def causes_at(
    lives: Biographies, event: int, holders: Mapping[int, Holder], *, failed: bool = False
) -> Iterator[Diagnosed]:
    """The causes of memory just after an event, the most memory first. ``holders``: what holds the
    blocks, by row of the ledger. ``failed``: memory ran out here, so what the program would have
    used later is unknown: only what its exception holds is a cause.
    """
    blocks = blocks_at(lives, event, failed=failed)
    for group in groups_of(blocks, holders, tensors_at(lives, event)):
        for rule in (exceptions.diagnose,) if failed else RULES:
            diagnosis = rule(group)
            if diagnosis is not None:
                if diagnosis.rule:
                    yield Diagnosed(group, diagnosis, _without(lives, group.blocks))
                break


def _without(lives: Biographies, blocks: tuple[HeldBlock, ...]) -> int:
    """The most memory in the trace if these blocks were freed after their last use."""
    ends = list(lives.ledger.freed)
    early = lives.ends_of_use()
    for block in blocks:
        ends[block.row] = early[block.row]
    return max(lives.ledger.running(ends))
