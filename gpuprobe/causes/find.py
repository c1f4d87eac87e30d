"""The causes of the memory at a peak that is not needed, or larger than it must be."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import islice
from typing import Final, NamedTuple

from gpuprobe.analysis.peak.needs import Biographies
from gpuprobe.causes.answer import Answer, EditKind
from gpuprobe.causes.cache import LEAST_CACHED, Cache, CachedMemory
from gpuprobe.causes.groups import (
    LEAST,
    LEAST_EFFECT,
    HeldBlock,
    HeldGroup,
    blocks_at,
    groups_of,
    held_blocks,
)
from gpuprobe.causes.live_memory import Excess, LiveMemory, Variable
from gpuprobe.causes.replays import Both, FreedEarly, KindedTrace, Remedy, Replay, Smaller
from gpuprobe.causes.rules import CACHED, LARGER, RULES, autocast, exceptions
from gpuprobe.causes.rules.gradients import LATE_GRADIENTS
from gpuprobe.causes.rules.holders import LIVE_VARIABLE
from gpuprobe.causes.rules.log_softmaxes import SAVED
from gpuprobe.model.causes import Bound
from gpuprobe.model.memory import Category
from gpuprobe.model.needs import Need
from gpuprobe.model.place import Place
from gpuprobe.model.run.holders import Holder, HolderRoot, Kept

FREED_EARLY = "with what only this holder keeps freed after its last use"
FREED_AFTER_USE = "with this memory freed after its last use, if nothing else holds it"


NO_GRAD = "with torch.no_grad():"
"""The code of the remedy that makes no graph."""


_MOST_FIRST: Final = 3
"""If no cause saves anything alone: for how many of them a second one is searched."""


class Diagnosed(NamedTuple):
    """A group of memory, and the answer of the first rule that knows it."""

    group: HeldGroup
    answer: Answer
    without: int
    """The most memory in the trace, in bytes, without it; if nothing else holds it."""
    replay: Replay
    assumed: str = FREED_EARLY
    """What `without` assumes, in words."""
    kept_at: Place | None = None
    """The line to change, if that is not where the memory is allocated."""
    bound: Bound = Bound.EXACT
    """Whether the program may need more without it, as what else holds it is unknown, or less."""
    other: Diagnosed | None = None
    """A cause at a second moment that is as high, without which the remedy alone saves nothing."""

    def answered(self, answer: Answer) -> Diagnosed:
        """The same memory with another answer."""
        replay = self.replay
        if isinstance(replay, FreedEarly):
            replay = replay.with_remedy(remedy_of(answer))
        return self._replace(answer=answer, replay=replay)


def causes_at(
    lives: Biographies,
    event: int,
    holders: Mapping[int, Holder],
    *,
    failed: bool = False,
    variable: Variable = lambda frames: "",
    otherwise: Callable[[HeldGroup], Answer | None] | None = None,
    others: Mapping[int, Holder] | None = None,
) -> Iterator[Diagnosed]:
    """The causes of memory just after an event, the one that saves most first. ``holders``: what
    holds the blocks, by row of the ledger (`searched_at`); ``others``: what else holds some of
    them, None if unknown. ``variable``: see `LiveMemory`. ``failed``: memory ran out here, so what
    the program would have used later is unknown: only what its exception holds is a cause.
    ``otherwise``: one more rule of memory that is not needed, the last.
    """
    if not failed and (rows := _unreachable(lives, event, holders)):
        lives = lives.without(rows)
    peak = max(lives.ledger.allocated_after())
    least = LEAST_EFFECT * lives.tensors(event)
    traced = KindedTrace(lives)

    def at(moment: int) -> list[Diagnosed]:
        diagnosed = [
            _with_variable(one, variable)
            for one in _unneeded(traced, moment, holders, otherwise, others, failed=failed)
        ]
        if not failed:
            diagnosed += _chosen(LiveMemory(lives, moment, holders, variable), traced, diagnosed)
        return diagnosed

    diagnosed = at(event)
    known: set[int] = set()
    # What a remedy saves counts, but not what it saves of others' memory.
    saved = {
        id(one): one.group.bytes if failed else min(one.group.bytes, peak - one.without)
        for one in diagnosed
    }
    # Gradients are as large as a copy of the weights, and come back with the next step.
    diagnosed.sort(
        key=lambda one: (
            one.answer.rule == SAVED,  # training needs it, if not at once
            _by_the_end(lives, one),
            -saved[id(one)],
            one.answer.rule == LATE_GRADIENTS,
        )
    )
    for one in diagnosed:
        if 2 * one.group.outside(known) <= one.group.bytes:
            continue  # most of it has a better remedy
        if failed or peak - one.without >= least:
            known |= {block.row for block in one.group.blocks}
            yield one
    if not known and not failed:
        diagnosed.sort(key=lambda one: -one.group.bytes)
        pairs = (_with_other(one, at, peak - 2 * least) for one in diagnosed[:_MOST_FIRST])
        yield from islice(filter(None, pairs), 1)


def _with_variable(one: Diagnosed, variable: Variable) -> Diagnosed:
    """With the variable that the memory was made for, if no name leads to it now."""
    holder = one.group.holder
    nameless = holder is not None and holder.root in (HolderRoot.OUTSIDE, HolderRoot.CYCLE)
    name = variable(one.group.main.frames) if nameless else ""
    if not name:
        return one
    made = f"what {one.group.main.made_at} makes is for the variable {name}"
    text = f"{one.answer.sentence}; {made}"
    return one._replace(answer=replace(one.answer, sentence=text))


def _with_other(
    first: Diagnosed, at: Callable[[int], list[Diagnosed]], most: float
) -> Diagnosed | None:
    """Combine a cause that saves nothing alone with a second one. Without the first, memory is as
    high at another moment: the second is the cause there that saves most. None if the program
    needs more than ``most`` bytes without both.
    """
    traced = first.replay.main
    running = first.replay.running(traced)
    moment = running.index(max(running)) - 1
    seconds = [
        (replay.peak(traced), one, replay)
        for one in (at(moment) if moment >= 0 else [])
        for replay in [Both(first.replay, one.replay)]
        if one.answer.rule != first.answer.rule or one.group.main.row != first.group.main.row
    ]
    after, second, replay = min(seconds, key=lambda one: one[0], default=(0, None, None))
    if second is None or replay is None or after > most:
        return None
    answer = Answer(
        first.answer.rule,
        f"{first.answer.sentence}. Alone, this saves little: memory is as high at another moment, "
        f"when {second.answer.sentence}",
        f"both: {first.answer.remedy}; and {second.answer.remedy}",
        "; ".join(filter(None, dict.fromkeys((first.answer.code, second.answer.code)))),
        first.answer.edit,
    )
    return first._replace(
        answer=answer,
        without=after,
        replay=replay,
        assumed=" and ".join(dict.fromkeys((first.assumed, second.assumed))),
        bound=first.bound if first.bound is not Bound.EXACT else second.bound,
        other=second,
    )


def _chosen(live: LiveMemory, traced: KindedTrace, late: list[Diagnosed]) -> Iterator[Diagnosed]:
    """The memory that is larger than it must be, without memory that is not needed at all."""
    peak, least = max(live.ledger.allocated_after()), LEAST_EFFECT * live.tensors
    # If memory is kept too long, the cause is what keeps it, not that it is large. Memory that
    # variables of this step or unknown things keep is different: there, a computation that is too
    # large is the cause, if it saves more.
    late = [one for one in late if peak - one.without >= least]
    kept = [one for one in late if one.group.main.earlier or not _of_a_step(one)]
    most = max((peak - one.without for one in late), default=0)
    rows_late, rows_kept = _rows(late), _rows(kept)
    for _, one in _larger(live, traced):
        rows = rows_kept if peak - one.without > most else rows_late
        if 2 * one.group.outside(rows) >= one.group.bytes:
            yield one


def _of_a_step(one: Diagnosed) -> bool:
    """Whether a variable or something unknown keeps the memory."""
    return one.answer.rule == LIVE_VARIABLE or one.group.holder is None


def _rows(causes: Iterable[Diagnosed]) -> set[int]:
    return {block.row for one in causes for block in one.group.blocks}


_OF_TRAINING: Final = (Category.GRADIENT, Category.OPTIMIZER_STATE, Category.PARAMETER)


def _by_the_end(lives: Biographies, one: Diagnosed) -> bool:
    """Whether memory is not needed only because the program ends: parameters, gradients and
    optimizer state with a name, after the last step of an optimizer. Other memory that is not
    needed is a better cause.
    """
    holder = one.group.holder
    named = holder is not None and holder.root is not HolderRoot.CYCLE
    return named and lives.is_the_end and one.group.mostly(*_OF_TRAINING)


def searched_at(lives: Biographies, event: int, *, failed: bool = False) -> list[HeldBlock]:
    """The blocks just after an event for which `causes_at` has to know the holders."""
    blocks = {block.row: block for block in blocks_at(lives, event, failed=failed)}
    if not failed:
        needs = lives.needs(event)
        left = {row: need for row, need in needs.items() if need is Need.OPEN}
        blocks.update((block.row, block) for block in held_blocks(lives, left))
        live = LiveMemory(lives, event)
        converted = dict.fromkeys(autocast.converted(live), Need.LATER)
        blocks.update((block.row, block) for block in held_blocks(lives, converted))
        for excess, _ in _larger(live, KindedTrace(lives)):
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
    traced: KindedTrace,
    event: int,
    holders: Mapping[int, Holder],
    otherwise: Callable[[HeldGroup], Answer | None] | None,
    others: Mapping[int, Holder] | None,
    *,
    failed: bool,
) -> Iterator[Diagnosed]:
    lives = traced.lives
    cached = {
        lives.ledger.size[row]
        for row, holder in holders.items()
        if holder.root is HolderRoot.AUTOCAST
    }
    blocks = autocast.without_cached(blocks_at(lives, event, failed=failed), cached)
    last = () if otherwise is None else (otherwise,)
    for group in groups_of(blocks, holders, lives.tensors(event)):
        for rule in (*((exceptions.diagnose,) if failed else RULES), *last):
            answer = rule(group)
            if isinstance(answer, Answer):
                everywhere = group.of_evaluations
                alone = FreedEarly(traced, event, group.blocks, {}, {}, evaluations=everywhere)
                kept = [*group.blocks, *_by_graphs_alone(group, blocks, holders)]
                replay = FreedEarly(
                    traced,
                    event,
                    kept,
                    holders,
                    others or {},
                    remedy_of(answer),
                    evaluations=everywhere,
                )
                yield Diagnosed(
                    group,
                    answer,
                    alone.peak(traced),
                    replay,
                    FREED_AFTER_USE if others is None else FREED_EARLY,
                    bound=Bound.OR_MORE
                    if others is None
                    else _bound(group, answer, replay, blocks, holders),
                )
            if answer is not None:
                break


_EXACT: Final = 0.02
"""The share of a group up to which more memory of its kind leaves a figure exact."""


def _bound(
    group: HeldGroup,
    answer: Answer,
    replay: FreedEarly,
    blocks: Iterable[HeldBlock],
    holders: Mapping[int, Holder],
) -> Bound:
    """Whether the remedy may free more than the group: what the same thing kept before, or what
    waits for its use with the group, of which copies on the CPU take the place as well.
    """
    more = replay.alike_left()
    if answer.edit is EditKind.TO_CPU and group.holder is not None:
        owner, lines = group.holder.owner, {block.made_at for block in group.blocks}
        more += sum(
            block.bytes
            for block in blocks
            if block.need is Need.NOT_YET
            and block.made_at in lines
            and (holder := holders.get(block.row)) is not None
            and holder.owner == owner
        )
    return Bound.OR_LESS if more > _EXACT * group.bytes else Bound.EXACT


def _unreachable(lives: Biographies, event: int, holders: Mapping[int, Holder]) -> set[int]:
    """Blocks that the program cannot use again, as no name leads to them, among those of which the
    recording ends before they are freed; or that only a cache of results has, and it does not use
    since an earlier step, such as the object of a method that was called.
    """
    roots = {
        row: holders[row].root
        for row, need in lives.needs(event).items()
        if need is Need.OPEN and row in holders
    }
    return {
        row
        for row, root in roots.items()
        if root is HolderRoot.CYCLE or (root is HolderRoot.CACHE and not lives.used_here(row))
    }


def _by_graphs_alone(
    group: HeldGroup, blocks: Iterable[HeldBlock], holders: Mapping[int, Holder]
) -> Iterator[HeldBlock]:
    """Further blocks that the graphs of a group hold, if no name leads to these graphs: blocks that
    only C++ holds."""
    if group.holder is None or group.holder.root is not HolderRoot.OUTSIDE:
        return
    if group.holder.kept in (Kept.GRAD, Kept.SAVED, Kept.VARIABLE):
        known = {block.row for block in group.blocks}
        for block in blocks:
            holder = holders.get(block.row)
            outside = holder is not None and holder.root is HolderRoot.OUTSIDE
            if outside and block.row not in known and block.need.needless:
                yield block


def remedy_of(answer: Answer) -> Remedy:
    """Which part of the memory the remedy of an answer frees."""
    if answer.edit is EditKind.DETACH:
        return Remedy.DETACHED
    return Remedy.NO_GRAPH if answer.code == NO_GRAD else Remedy.RELEASED


def _larger(live: LiveMemory, traced: KindedTrace) -> Iterator[tuple[Excess, Diagnosed]]:
    for rule in LARGER:
        for excess in rule(live):
            one = _diagnosed(live, traced, excess, rule)
            if one is not None:
                yield excess, one


def _diagnosed(
    live: LiveMemory,
    traced: KindedTrace,
    excess: Excess,
    rule: Callable[[LiveMemory], Iterator[Excess]],
) -> Diagnosed | None:
    """The cause of memory that is larger than it must be; None if it saves too little."""
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
    replay = Smaller(traced, excess, rule)
    return Diagnosed(
        group,
        excess.answer,
        replay.peak(traced),
        replay,
        excess.assumed,
        excess.kept_at,
        excess.bound,
    )
