"""The most memory of a run without a cause: its traces, replayed with other ends and sizes.

*Freed earlier*: what only the holder keeps goes, and what else holds a block still keeps it. At the
peak that is known, from a search there. At other moments it follows from the peak: if something
else, such as the variable that the next result is assigned to, holds the newest block of a line a
hundred operators after it was made, so it does with each.

*Smaller*: blocks have the sizes that they would have in the changed program.

Blocks of other steps are recognised by the code that makes them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from enum import Enum
from functools import cached_property
from itertools import accumulate
from typing import Final, NamedTuple, TypeAlias

from gpuprobe.allocator.changed import Request, most_allocated
from gpuprobe.analysis.peak.needs import Biographies
from gpuprobe.analysis.peak.peaks import PeakSite
from gpuprobe.analysis.trace.ledger import ledger_of
from gpuprobe.causes.groups import HeldBlock, ProgramStacks, is_evaluation
from gpuprobe.causes.live_memory import Excess, LiveMemory
from gpuprobe.errors import DataError
from gpuprobe.model.memory import Category
from gpuprobe.model.needs import Need
from gpuprobe.model.run.holders import Holder, HolderRoot, Kept
from gpuprobe.model.run.session import Step

Kind: TypeAlias = tuple[object, ...]
"""What blocks that the same code makes have in common: the lines of the program, the operator, the
module, and the size if the operator makes several."""


class Changed(NamedTuple):
    """For each row of a trace, the events that make it and free it, and its size in bytes, in the
    changed program.
    """

    starts: Sequence[int]
    ends: Sequence[int]
    sizes: Sequence[int]

    def running(self, events: int) -> list[int]:
        """The allocated bytes: before the first event, and after each of ``events``."""
        delta = [0] * (events + 2)
        for start, end, size in zip(*self, strict=True):
            if end > start:
                delta[start + 1] += size
                delta[end + 1] -= size
        delta.pop()
        return list(accumulate(delta))


class KindedTrace:
    """A trace, with the kind of each row. ``several``: names of operators that make several blocks
    at once, of which each size is a kind; by default those of the trace.
    """

    def __init__(self, lives: Biographies, several: Collection[str] | None = None) -> None:
        self.lives = lives
        self._several = several
        self._outside: dict[tuple[str, str], list[int]] = {}

    @cached_property
    def several(self) -> Collection[str]:
        """The names of operators that make several blocks at once."""
        if self._several is not None:
            return self._several
        ledger, made = self.lives.ledger, self.lives.made
        counts = Counter(made)
        rows = zip(ledger.column("made_name"), made, strict=True)
        names = {name for name, number in rows if number and counts[number] > 1}
        return frozenset(ledger.trace.stacks.strings[name] for name in names)

    @cached_property
    def kinds(self) -> list[Kind]:
        """The kind of each row."""
        ledger = self.lives.ledger
        stacks, strings = ProgramStacks(ledger.trace.stacks), ledger.trace.stacks.strings
        columns = ledger.stack, ledger.column("made_name"), ledger.column("module")
        return [
            (
                stacks.lines(stack),
                strings[name],
                strings[module],
                size if strings[name] in self.several else 0,
            )
            for stack, name, module, size in zip(*columns, ledger.requested, strict=True)
        ]

    @cached_property
    def kinds_of_evaluations(self) -> list[Kind]:
        """The kinds, with those of forward passes in eval mode alike, wherever they are called."""
        ledger = self.lives.ledger
        phases, strings = ledger.column("made_phase"), ledger.trace.stacks.strings
        evaluations = {code for code in set(phases) if is_evaluation(strings[code])}
        return [
            (_innermost(kind), *kind[1:]) if phase in evaluations else kind
            for kind, phase in zip(self.kinds, phases, strict=True)
        ]

    def left(self, function: tuple[str, str], event: int) -> int:
        """The first allocation after an event that a function (its file and name) does not make or
        call; -1 if the event is before the trace.
        """
        if event < 0:
            return -1
        if function not in self._outside:
            ledger = self.lives.ledger
            table = ledger.trace.stacks
            inside = {
                stack
                for stack in set(ledger.stack[: ledger.made])
                if function in ((one.filename, one.name) for one in table.frames_of(stack))
            }
            pairs = zip(ledger.start[: ledger.made], ledger.stack, strict=False)
            self._outside[function] = [start for start, stack in pairs if stack not in inside]
        outside = self._outside[function]
        at = bisect_right(outside, event)
        return outside[at] if at < len(outside) else self.lives.ledger.events

    @cached_property
    def is_reproduced(self) -> bool:
        """Whether the allocator, simulated with the recorded requests, has the recorded peak."""
        ledger = self.lives.ledger
        if not ledger.by_allocator:
            return False
        as_recorded = self.requests(Changed(ledger.start, ledger.freed, ledger.size))
        return most_allocated(ledger.trace, as_recorded) == max(ledger.allocated_after())

    def requests(self, changed: Changed) -> Iterator[Request]:
        """What the program requests, changed: rows that are never made are left out."""
        ledger = self.lives.ledger
        rows = zip(
            changed.starts,
            changed.ends,
            ledger.freed,
            ledger.done,
            map(min, changed.sizes, ledger.requested),
            ledger.column("stream"),
            ledger.values("address", range(len(ledger))),
            strict=True,
        )
        for start, end, freed, done, size, stream, address in rows:
            done = done if end == freed else end
            if done > start and size:
                yield Request(start, end, done, size, stream, address)

    def after_the_step(self, event: int) -> int:
        """The first allocation after an event that no optimizer makes."""
        at = bisect_right(self._not_by_optimizers, event)
        left = self._not_by_optimizers[at : at + 1]
        return left[0] if left else self.lives.ledger.events

    @cached_property
    def _not_by_optimizers(self) -> list[int]:
        ledger = self.lives.ledger
        phases, strings = ledger.column("made_phase"), ledger.trace.stacks.strings
        made = zip(ledger.start[: ledger.made], phases, strict=False)
        return [start for start, phase in made if not strings[phase].startswith("optimizer")]


class Replay(ABC):
    """A change of the program, and what its memory would be. ``main``: the trace of the peak."""

    main: KindedTrace

    @abstractmethod
    def changed(self, traced: KindedTrace) -> Changed:
        """The rows of a trace of the run."""

    def running(self, traced: KindedTrace) -> list[int]:
        """As `Changed.running`, of a trace of the run."""
        return self.changed(traced).running(traced.lives.ledger.events)

    def peak(self, traced: KindedTrace) -> int:
        """The most memory in a trace of the run, in bytes, if blocks that do not change have the
        recorded sizes.
        """
        return max(self.running(traced))

    def served_peak(self, traced: KindedTrace) -> int:
        """As `peak`, with the sizes of blocks that the allocator gives in the changed program, if
        simulated it gives the recorded ones in the program as it is.
        """
        found = None
        if traced.is_reproduced:
            found = most_allocated(traced.lives.ledger.trace, traced.requests(self.changed(traced)))
        return self.peak(traced) if found is None else found


class Both(Replay):
    """Two changes."""

    def __init__(self, first: Replay, second: Replay) -> None:
        self.main = first.main
        self._changes = first, second

    def changed(self, traced: KindedTrace) -> Changed:
        one, other = (change.changed(traced) for change in self._changes)
        return Changed(
            list(map(max, one.starts, other.starts)),
            list(map(min, one.ends, other.ends)),
            list(map(min, one.sizes, other.sizes)),
        )


class Remedy(Enum):
    """Which part of the memory that something keeps a remedy frees."""

    RELEASED = "released"  # all of it
    DETACHED = "detached"  # what its autograd graphs saved; its tensors stay
    NO_GRAPH = "no graph"  # the graphs are not made, so that no graph keeps anything


class FreedEarly(Replay):
    """The trace if blocks that something keeps were freed as soon as nothing else needs or holds
    them, and those that are not used yet were allocated at their first use. ``traced``: the trace
    of the peak, which is just after ``event``; ``blocks``: those of the holder; ``holders``: the
    holder of each block, by row; ``others``: what else holds blocks.
    """

    def __init__(
        self,
        traced: KindedTrace,
        event: int,
        blocks: Collection[HeldBlock],
        holders: Mapping[int, Holder],
        others: Mapping[int, Holder],
        remedy: Remedy = Remedy.RELEASED,
        *,
        evaluations: bool = False,
    ) -> None:
        self.main = traced
        self._evaluations = evaluations
        self._event = event
        self._blocks = blocks
        self._holders = holders
        self._others = others
        self._remedy = remedy
        kinds = self._kinds(traced)
        self._waiting = {kinds[block.row] for block in blocks if block.need is Need.NOT_YET}
        rows = [block.row for block in blocks if kinds[block.row] not in self._waiting]
        self._rows = set(rows).difference(self._stay(rows))
        self._held = self._held_elsewhere()
        self._functions = {
            kinds[row]: (holders[row].file, holders[row].function)
            for row in self._rows
            if row in holders and holders[row].root is HolderRoot.EXCEPTION
        }
        """By kind, the function that an exception ended: until then it holds its variables."""
        self._gradients = {kinds[b.row] for b in blocks if b.category is Category.GRADIENT}
        """They can be freed when the optimizer has ended, not when it has read them."""

    def with_remedy(self, remedy: Remedy) -> FreedEarly:
        """The same blocks, with another remedy."""
        return FreedEarly(
            self.main,
            self._event,
            self._blocks,
            self._holders,
            self._others,
            remedy,
            evaluations=self._evaluations,
        )

    def _kinds(self, traced: KindedTrace) -> list[Kind]:
        return traced.kinds_of_evaluations if self._evaluations else traced.kinds

    def _stay(self, rows: Sequence[int]) -> Iterator[int]:
        """The rows that are not freed at the peak."""
        holders, others, remedy = self._holders, self._others, self._remedy
        made, kinds = self.main.lives.made, self._kinds(self.main)
        newest: dict[Kind, int] = {}
        for row in rows:
            own, other = holders.get(row), others.get(row)
            if own is not None and own.root is HolderRoot.CACHE:  # a limited one has one result
                newest[kinds[row]] = max(row, newest.get(kinds[row], row), key=made.__getitem__)
            if remedy is not Remedy.RELEASED and own is not None and not by_graph(own):
                yield row  # the tensor itself is kept
            elif other is None or (remedy is Remedy.NO_GRAPH and by_graph(other)):
                continue
            elif remedy is Remedy.DETACHED and by_graph(other):
                if self._in_undetached_graph(row):
                    yield row
            else:
                yield row
        for row, need in self.main.lives.needs(self._event).items():
            roots = [one.root for one in (holders.get(row), others.get(row)) if one is not None]
            elsewhere = len(roots) == 2 and HolderRoot.CACHE not in roots
            if elsewhere and need is Need.NOT_YET:
                continue  # what comes into the cache with its first use is not in it
            if made[row] > made[newest.get(kinds[row], row)]:
                del newest[kinds[row]]  # the cache may have that one, if it has one
        yield from newest.values()

    def _is_kept(self, row: int) -> bool:
        """Whether something that the remedy does not change keeps a row at the peak."""
        known = (self._holders.get(row), self._others.get(row))
        return any(one is not None and not by_graph(one) for one in known)

    def _in_undetached_graph(self, row: int) -> bool:
        """Whether other tensors' graphs keep a row though what this holder keeps is detached, of
        every iteration: through its tensors a graph leads to those of earlier iterations.
        """
        made = self.main.lives.made[row]
        return any(begin < made <= end for begin, end in self._graphs)

    @cached_property
    def _graphs(self) -> Sequence[tuple[int, int]]:
        """For each other tensor with a graph, the operator after which its graph begins, as the one
        before is detached there, and the one that made it.
        """
        lives, kinds = self.main.lives, self._kinds(self.main)
        owners = {self._holders[b.row].owner for b in self._blocks if b.row in self._holders}
        detached: set[Kind] = set()
        ends = {lives.operator_at(self._event)}
        for known in (self._holders, self._others):
            for row, holder in known.items():
                if by_graph(holder) or not holder.graphs:
                    continue
                if holder.owner in owners:
                    detached.add(kinds[row])
                else:
                    ends.add(lives.made[row])
        cuts = sorted({lives.made[row] for row, kind in enumerate(kinds) if kind in detached})
        found = []
        for end in ends:
            at = bisect_right(cuts, end) - 2
            found.append((cuts[at] if at >= 0 else 0, end))
        return found

    def _held_elsewhere(self) -> Mapping[Kind, int]:
        """By kind, for how many operators after the one that made it something else holds a block,
        at least.
        """
        lives, kinds = self.main.lives, self._kinds(self.main)
        now, made = lives.operator_at(self._event), lives.made
        newest: dict[Kind, int] = dict.fromkeys(self._waiting, now)
        for row in self._rows:
            newest[kinds[row]] = max(made[row], newest.get(kinds[row], 0))
        held = dict.fromkeys(newest, 0)
        for row, need in lives.needs(self._event).items():
            kind = kinds[row]
            if row in self._rows or made[row] <= newest.get(kind, made[row]):
                continue
            holder = self._others.get(row) or self._holders.get(row)
            no_graph = self._remedy is Remedy.NO_GRAPH and holder is not None
            if need.needless and not (no_graph and by_graph(holder)):
                held[kind] = max(held[kind], now - made[row])
        return held

    def changed(self, traced: KindedTrace) -> Changed:
        starts = self._starts(traced)
        return Changed(starts, self.ends(traced, starts), traced.lives.ledger.size)

    def alike_left(self) -> int:
        """The bytes at the highest moment of the changed trace that nothing uses again, were made
        on the lines of these blocks by another call, and were freed before the event: whether the
        same thing kept them is unknown.
        """
        lives, kinds = self.main.lives, self._kinds(self.main)
        running = self.running(self.main)
        moment = running.index(max(running)) - 1
        starts, ends, sizes = self.changed(self.main)
        used, then = lives.ends_of_use(), lives.needs(self._event)
        freed = {kinds[row] for row in self._rows}
        lines = {line for kind in freed for line in _innermost(kind)}
        return sum(
            size
            for row, size in enumerate(sizes)
            if starts[row] <= moment < ends[row]
            and used[row] <= moment
            and row not in then
            and kinds[row] not in freed
            and lines.intersection(_innermost(kinds[row]))
        )

    def ends(self, traced: KindedTrace, starts: Sequence[int]) -> list[int]:
        """For each row of a trace, the event before which it is freed. ``starts``: where they
        begin.
        """
        lives = traced.lives
        ledger, early, operator = lives.ledger, lives.ends_of_use(), lives.operator
        before = lives.operator_at(-1)
        ends = list(ledger.freed)
        for row, kind in enumerate(self._kinds(traced)):
            held = self._held.get(kind)
            if held is None:
                continue
            end, until = early[row], lives.made[row] + held
            if held and until > before:
                end = max(end, bisect_right(operator, until))
            if kind in self._gradients:
                end = max(end, traced.after_the_step(early[row]))
            if kind in self._functions:
                end = max(end, traced.left(self._functions[kind], ledger.start[row]))
            ends[row] = min(ends[row], end)
        if traced is self.main:  # what is held at the peak is known
            for row in lives.needs(self._event):
                if row in self._rows:
                    ends[row] = min(ends[row], max(self._event, ledger.start[row] + 1))
                elif self._kinds(traced)[row] not in self._waiting and self._is_kept(row):
                    ends[row] = max(ends[row], min(self._event + 1, ledger.freed[row]))
        self._until_next(traced, starts, ends)
        return ends

    def _starts(self, traced: KindedTrace) -> Sequence[int]:
        """For each row, the event that makes it; the trace's end if it waits for a later one."""
        lives = traced.lives
        ledger = lives.ledger
        if not self._waiting:
            return ledger.start
        starts = list(ledger.start)
        for row, kind in enumerate(self._kinds(traced)):
            if kind in self._waiting:
                first = bisect_left(lives.operator, lives.first[row])
                starts[row] = max(starts[row], first) if lives.used_here(row) else ledger.events
        return starts

    def _until_next(self, traced: KindedTrace, starts: Sequence[int], ends: list[int]) -> None:
        """What no longer waits is the value of a variable until the next one is made."""
        freed = traced.lives.ledger.freed
        following: dict[Kind, int] = {}
        rows = [row for row, kind in enumerate(self._kinds(traced)) if kind in self._waiting]
        for row in sorted(rows, key=starts.__getitem__, reverse=True):
            kind = self._kinds(traced)[row]
            if kind in following:
                ends[row] = min(freed[row], max(ends[row], following[kind] + 1))
            following[kind] = starts[row]


def _innermost(kind: Kind) -> tuple[object, ...]:
    """The line of the program that makes blocks of a kind."""
    lines = kind[0]
    return lines[:1] if isinstance(lines, tuple) else ()


def by_graph(holder: Holder | None) -> bool:
    """Whether a graph keeps the memory for its backward pass, and no tensor."""
    return holder is not None and holder.kept in (Kept.SAVED, Kept.VARIABLE)


class Smaller(Replay):
    """Blocks of other sizes, as a rule of the kind `LARGER` finds them. ``traced``: the trace of
    the peak.
    """

    def __init__(
        self, traced: KindedTrace, excess: Excess, rule: Callable[[LiveMemory], Iterator[Excess]]
    ) -> None:
        self.main = traced
        self._excess = excess
        self._rule = rule

    def changed(self, traced: KindedTrace) -> Changed:
        ledger = traced.lives.ledger
        excess: Excess | None = self._excess
        if traced is not self.main:
            excess = self._in(traced)
        sizes, ends = list(ledger.size), list(ledger.freed)
        if excess is None:
            # Where the memory is made, it may not be recognised: its share counts.
            shares = self._shares
            sizes = [
                int(size * shares.get(kind, 1.0))
                for size, kind in zip(sizes, traced.kinds, strict=True)
            ]
        else:
            for row, size in excess.sizes.items():
                sizes[row] = min(size, sizes[row])
            for row, end in excess.ends.items():
                ends[row] = min(ends[row], max(end, ledger.start[row] + 1))
        return Changed(ledger.start, ends, sizes)

    @cached_property
    def _shares(self) -> Mapping[Kind, float]:
        """By kind, the part of its sizes that is left."""
        size, kinds = self.main.lives.ledger.size, self.main.kinds
        before: Counter[Kind] = Counter()
        after: Counter[Kind] = Counter()
        for row, new in self._excess.sizes.items():
            before[kinds[row]] += size[row]
            after[kinds[row]] += min(new, size[row])
        return {kind: after[kind] / total for kind, total in before.items() if total}

    def _in(self, traced: KindedTrace) -> Excess | None:
        """The same cause at the peak of another trace."""
        live = LiveMemory(traced.lives, traced.lives.ledger.peak())
        named = self._excess.answer.rule
        found = [one for one in self._rule(live) if one.answer.rule == named]
        kind = self.main.kinds[self._excess.main]
        return next((one for one in found if traced.kinds[one.main] == kind), None) or next(
            iter(found), None
        )


class RunPeak(NamedTuple):
    """The most memory of a run, in bytes; ``at_least``: other steps may have more."""

    peak: int
    at_least: bool


_MOST_TRACES: Final = 32
_ALIKE: Final = 0.01
"""Steps whose peaks differ by no more than this share do the same."""


def over_all_steps(site: PeakSite, replays: Sequence[Replay]) -> list[RunPeak]:
    """The most memory of the run for each replay: in the trace of the peak, and in the other steps
    that have more, or may have, the highest first. A step without a trace counts as one with the
    same peak, and so does one of which the counters have only bounds: it did not raise them.
    """
    highest = [replay.peak(replay.main) for replay in replays]
    where: list[KindedTrace] = [replay.main for replay in replays]
    unknown = [0] * len(replays)
    """The most memory that a step has which is like none that is replayed."""
    if not site.rank.steps or not replays:
        return [RunPeak(one.served_peak(one.main), at_least=False) for one in replays]
    main = replays[0].main
    least = site.rank.columns.number("allocated_least", site.device)
    most = site.rank.columns.number("allocated_most", site.device)
    traced = {step.index: step for step in site.rank.traced_steps()}
    done = [max(main.lives.ledger.allocated_after())]
    for at in sorted(range(len(least)), key=least.__getitem__, reverse=True):
        alike = any(abs(least[at] - peak) <= _ALIKE * peak for peak in done)
        bound = least[at] if alike else most[at]
        rows = [row for row, peak in enumerate(highest) if bound > peak]
        others = None
        if rows and len(done) <= _MOST_TRACES:
            others = _traces_but(site, traced.get(site.rank.steps[at].index), main)
        if others is not None:
            done.append(least[at])
            for other in others:
                for row in rows:
                    peak = replays[row].peak(other)
                    if peak > highest[row]:
                        highest[row], where[row] = peak, other
        elif not alike:
            for row in rows:
                unknown[row] = max(unknown[row], least[at])
    served = [replay.served_peak(at) for replay, at in zip(replays, where, strict=True)]
    return [RunPeak(peak, more > peak) for peak, more in zip(served, unknown, strict=True)]


def _traces_but(site: PeakSite, step: Step | None, known: KindedTrace) -> list[KindedTrace] | None:
    """A step's traces of the device, apart from the known one and those without events; None if
    there are none, they cannot be read, or have no uses.
    """
    if step is None or not step.traces:
        return None
    try:
        ledgers = [ledger_of(one) for one in site.rank.traces.of(step) if one.device == site.device]
    except DataError:
        return None
    main = known.lives.ledger
    others = [
        Biographies(one)
        for one in ledgers
        if one.events and (one.trace.step, one.start) != (main.trace.step, main.start)
    ]
    if not all(one.traced for one in others):
        return None
    return [KindedTrace(one, known.several) for one in others]
