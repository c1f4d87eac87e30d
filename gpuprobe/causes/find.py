"""The causes of the memory at a peak that is not needed, or larger than it must be."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from gpuprobe.analysis.peak.needs import Biographies
from gpuprobe.causes.answer import Answer
from gpuprobe.causes.cache import LEAST_CACHED, Cache, CachedMemory
from gpuprobe.causes.groups import (
    LEAST,
    HeldBlock,
    HeldGroup,
    ProgramStacks,
    blocks_at,
    groups_of,
    held_blocks,
)
from gpuprobe.causes.live_memory import Excess, LiveMemory, Variable
from gpuprobe.causes.rules import CACHED, LARGER, RULES, exceptions
from gpuprobe.causes.rules.gradients import LATE_GRADIENTS
from gpuprobe.model.needs import Need
from gpuprobe.model.place import Place
from gpuprobe.model.run.holders import Holder, HolderRoot

LEAST_EFFECT = 0.05
"""The share of the tensors at the peak that a remedy has to save: other memory may be as high a
moment later."""

FREED_EARLY = "with this memory freed after its last use"


class Diagnosed(NamedTuple):
    """A group of memory, and the answer of the first rule that knows it."""

    group: HeldGroup
    answer: Answer
    without: int
    """The most memory in the trace, in bytes, without it."""
    assumed: str = FREED_EARLY
    """What `without` assumes, in words."""
    kept_at: Place | None = None
    """The line to change, if that is not where the memory is allocated."""


def causes_at(
    lives: Biographies,
    event: int,
    holders: Mapping[int, Holder],
    *,
    failed: bool = False,
    variable: Variable = lambda frames: "",
    otherwise: Callable[[HeldGroup], Answer | None] | None = None,
) -> Iterator[Diagnosed]:
    """The causes of memory just after an event, the one that saves most first. ``holders``: what
    holds the blocks, by row of the ledger (`searched_at`). ``variable``: see `LiveMemory`.
    ``failed``: memory ran out here, so what the program would have used later is unknown: only what
    its exception holds is a cause. ``otherwise``: one more rule of memory that is not needed, the
    last.
    """
    peak = max(lives.ledger.allocated_after())
    least = LEAST_EFFECT * lives.tensors(event)
    found = list(_unneeded(lives, event, holders, otherwise, failed=failed))
    if not failed:
        live = LiveMemory(lives, event, holders, variable)
        # Of memory whose end would come too late, why that is counts, not its size.
        late = {b.row for one in found if peak - one.without >= least for b in one.group.blocks}
        found += [one for _, one in _larger(live) if 2 * one.group.outside(late) >= one.group.bytes]
    known: set[int] = set()
    # What a remedy saves counts, but not what it saves of others' memory.
    saved = {
        id(one): one.group.bytes if failed else min(one.group.bytes, peak - one.without)
        for one in found
    }
    # Gradients are as large as a copy of the weights, and come back with the next step.
    found.sort(key=lambda one: (-saved[id(one)], one.answer.rule == LATE_GRADIENTS))
    for one in found:
        if 2 * one.group.outside(known) <= one.group.bytes:
            continue  # most of it has a better remedy
        if failed or peak - one.without >= least:
            known |= {block.row for block in one.group.blocks}
            yield one


def searched_at(lives: Biographies, event: int, *, failed: bool = False) -> list[HeldBlock]:
    """The blocks just after an event whose holders are part of a cause."""
    blocks = {block.row: block for block in blocks_at(lives, event, failed=failed)}
    if not failed:
        live = LiveMemory(lives, event)
        for excess, _ in _larger(live):
            rows = dict.fromkeys((*excess.rows, *excess.named), Need.LATER)
            blocks.update((block.row, block) for block in held_blocks(lives, rows))
    return list(blocks.values())


def cached_causes(cache: Cache) -> Iterator[CachedMemory]:
    """Why memory is in the cache, if enough is, or if a request failed for that reason."""
    if not cache.failed and cache.beyond < LEAST_CACHED * cache.reserved:
        return
    for rule in CACHED:
        found = list(rule(cache))
        yield from found
        if found:
            return


def _unneeded(
    lives: Biographies,
    event: int,
    holders: Mapping[int, Holder],
    otherwise: Callable[[HeldGroup], Answer | None] | None,
    *,
    failed: bool,
) -> Iterator[Diagnosed]:
    blocks = blocks_at(lives, event, failed=failed)
    last = () if otherwise is None else (otherwise,)
    for group in groups_of(blocks, holders, lives.tensors(event)):
        for rule in (*((exceptions.diagnose,) if failed else RULES), *last):
            answer = rule(group)
            if isinstance(answer, Answer):
                yield Diagnosed(group, answer, _without(lives, group.blocks))
            if answer is not None:
                break


def _larger(live: LiveMemory) -> Iterator[tuple[Excess, Diagnosed]]:
    for rule in LARGER:
        for excess in rule(live):
            one = _diagnosed(live, excess)
            if one is not None:
                yield excess, one


def _diagnosed(live: LiveMemory, excess: Excess) -> Diagnosed | None:
    """The cause, if it is large enough."""
    saved = sum(
        live.size[row] - min(live.size[row], excess.sizes.get(row, 0)) for row in excess.rows
    )
    if saved < LEAST * live.tensors:
        return None
    needs = {row: live.needs.get(row, Need.LATER) for row in excess.rows}
    blocks = held_blocks(live.lives, needs)
    known = [live.holders.get(row) for row in (excess.main, *excess.rows)]
    holders = [one for one in known if one is not None and one.root is not HolderRoot.OUTSIDE]
    group = HeldGroup(
        tuple(blocks),
        holders[0] if holders else None,
        live.tensors,
        chosen=held_blocks(live.lives, {excess.main: Need.LATER})[0],
    )
    return Diagnosed(group, excess.answer, live.without(excess), excess.assumed, excess.kept_at)


def _without(lives: Biographies, blocks: tuple[HeldBlock, ...]) -> int:
    """The most memory in the trace if these blocks, and all others from the same places in the
    program, were freed after their last use, and made no earlier than the step of their first one.
    """
    ledger = lives.ledger
    ends = list(ledger.freed)
    early = lives.ends_of_use()
    stacks = ProgramStacks(ledger.trace.stacks)
    places = {stacks.lines(ledger.stack[block.row]) for block in blocks}
    for row, stack in enumerate(ledger.stack):
        if stacks.lines(stack) in places:
            ends[row] = early[row]
    waiting = [block for block in blocks if block.need is Need.NOT_YET]
    used = max((b for b in waiting if b.last_use), key=lambda b: b.bytes, default=None)
    for block in blocks:
        ends[block.row] = early[block.row]
        if block.need is Need.NOT_YET and block is not used:
            ends[block.row] = ledger.start[block.row]
    return max(ledger.running(ends))
