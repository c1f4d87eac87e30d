"""The causes of the memory at a peak, from what a recording has: uses, growth, and holders.

A recording names the holder of what later steps do not use, as far as a search at the end of the
program, or of some steps, found it. ``gpuprobe explain`` runs the program again, finds the others,
and tries the remedies.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Final, NamedTuple

from gpuprobe.analysis.evaluation import WITH_GRADIENTS
from gpuprobe.analysis.growth import MANY_STEPS, MINIMUM_SHARE, Growth, keeper, rise_of
from gpuprobe.analysis.peak.needs import Biographies
from gpuprobe.analysis.peak.peaks import HighWater, PeakSite, by_category, live_at, window_of
from gpuprobe.analysis.trace.ledger import ledger_of
from gpuprobe.causes.answer import Answer, EditKind
from gpuprobe.causes.find import NO_GRAD, Diagnosed, causes_at
from gpuprobe.causes.groups import LEAST_BYTES, LEAST_EFFECT, HeldBlock, HeldGroup, is_evaluation
from gpuprobe.causes.replays import RunPeak, over_all_steps
from gpuprobe.causes.rules import cycles, graphs
from gpuprobe.causes.rules.gradients import LATE_GRADIENTS
from gpuprobe.causes.rules.holders import BY_KEY, LEAST_OF_A_STEP
from gpuprobe.causes.wording import kept_in
from gpuprobe.errors import DataError
from gpuprobe.model.actions import OOM
from gpuprobe.model.causes import Bound, Certainty, Effect, MemoryCause
from gpuprobe.model.findings import Finding
from gpuprobe.model.memory import Category
from gpuprobe.model.needs import Need
from gpuprobe.model.place import NoPlace, Place
from gpuprobe.model.report import LeakRow
from gpuprobe.model.run.columns import INDEX
from gpuprobe.model.run.holders import Holder, HolderRoot, Kept
from gpuprobe.model.run.recording import RankRecording
from gpuprobe.model.text import human_bytes
from gpuprobe.model.trace import GRAD_OFF
from gpuprobe.model.values import Peak, Unavailable

UNNEEDED = "unneeded"
"""The rule of memory that is not used again, and whose holder is unknown."""

CYCLE = "cycle"
"""The rule of objects that only refer to one another."""

GROWTH = "growth"
"""The rule of memory that grows from step to step, in a recording without uses."""

EVALUATION = "evaluation"
"""The rule of forward passes that train nothing and keep what a backward pass would use."""

_MOST = 5
_FAILED = Unavailable("what the program would allocate next is unknown")
_A_NUMBER = 1 << 10
"""Bytes up to which a tensor that is kept is probably a loss or another number."""


def cause_of(found: Diagnosed, effect: Effect, kept_at: Place | None = None) -> MemoryCause:
    """The cause as a record. ``kept_at``: the line that stores what holds it."""
    group, answer = found.group, found.answer
    return MemoryCause(
        rule=answer.rule,
        bytes=group.bytes,
        blocks=len(group.blocks),
        made_at=group.main.made_at,
        last_use=group.main.last_use,
        holder=group.holder,
        kept_at=kept_at,
        sentence=answer.sentence,
        remedy=answer.remedy,
        code=answer.code,
        effect=effect,
    )


def _untried(
    answer: Answer,
    size: int,
    blocks: int,
    peak: int,
    why: str,
    *,
    made_at: Place | NoPlace = NoPlace.UNKNOWN,
    holder: Holder | None = None,
) -> MemoryCause:
    """A cause that is known without uses. ``why``: why what the run would need is unknown."""
    return MemoryCause(
        rule=answer.rule,
        bytes=size,
        blocks=blocks,
        made_at=made_at,
        last_use=None,
        holder=holder,
        kept_at=None,
        sentence=answer.sentence,
        remedy=answer.remedy,
        code=answer.code,
        effect=Effect(Certainty.UNTRIED, peak, Unavailable(why)),
    )


_UNKNOWN: Final = Unavailable("what other steps would need is unknown: they have no trace")
_LEAST_KNOWN: Final = 0.25
"""The share of what a remedy may save that it saves though other holders keep theirs, at least: a
remedy that saves less is a change of another kind than what is replayed."""

_BY_STEPS = "it depends on the number of steps"


class _Failed(Biographies):
    """The uses in a trace that memory ran out in. What no operator has used since the operator
    ``since``, in a whole step before and in this one until then, counts as never used again.
    """

    def __init__(self, mark: HighWater, since: int) -> None:
        super().__init__(mark.ledger)
        self._since = since

    def is_open(self, row: int) -> bool:
        return super().is_open(row) and not self._is_idle(row)

    def need(self, row: int, event: int) -> Need:
        found = super().need(row, event)
        if found is Need.OPEN and self._is_idle(row):
            return Need.NEVER_AGAIN if self.last[row] else Need.NEVER
        return found

    def _is_idle(self, row: int) -> bool:
        touched = max(self.last[row], self.made[row])
        return row >= self.ledger.made and 0 < touched < self._since


def causes_in(site: PeakSite, mark: HighWater) -> tuple[MemoryCause, ...] | Unavailable:
    """The causes at a high water mark, the most memory first; `Unavailable` if the uses of memory
    were not traced.
    """
    lives = Biographies(mark.ledger)
    if not lives.traced:
        return Unavailable("the uses of memory were not traced")
    event = mark.event
    error = None if site.rank.end is None else site.rank.end.error
    failures = [at for at, action in enumerate(mark.ledger.trace.events.action) if action == OOM]
    holders = recorded_holders(mark)
    if error is not None and error.out_of_memory and failures:
        mark = live_at(mark.ledger, failures[-1])
        event = mark.event
        found = list(islice(causes_at(lives, event, holders, failed=True), _MOST))
        if found:
            untried = Effect(Certainty.UNTRIED, mark.allocated, _FAILED)
            return tuple(cause_of(one, untried) for one in found)
        lives = _Failed(mark, _begin_of_step_before(site, mark))
    every = certain_causes(site, lives, causes_at(lives, event, holders, otherwise=unneeded))
    chosen = over_steps(site, mark, list(islice(every, _MOST)))
    effects = [replayed(one, mark.allocated) for one in chosen]
    return tuple(
        cause_of(one, effect)
        for one, effect in zip(chosen, effects, strict=True)
        if saved_bytes(effect, one.group.bytes) >= LEAST_BYTES
    )


def over_steps(
    site: PeakSite, mark: HighWater, diagnosed: Sequence[Diagnosed]
) -> tuple[Diagnosed, ...]:
    """The causes with the most memory of all steps, not only that of the peak, and with what else
    holds theirs.
    """
    knowns = over_all_steps(site, [one.replay for one in diagnosed])
    return tuple(
        _with_peak(one, known, mark.allocated) for one, known in zip(diagnosed, knowns, strict=True)
    )


def _with_peak(diagnosed: Diagnosed, known: RunPeak, before: int) -> Diagnosed:
    if before - known.peak < _LEAST_KNOWN * (before - diagnosed.without):
        # Something else holds most of it as well, which the remedy may change, too.
        return diagnosed._replace(bound=Bound.OR_MORE)
    if not known.at_least:
        return diagnosed._replace(without=known.peak)
    # Neither more nor less is known of a figure that is too high itself.
    peak = before if diagnosed.bound is Bound.OR_LESS else known.peak
    return diagnosed._replace(without=peak, bound=Bound.OR_MORE)


def replayed(diagnosed: Diagnosed, peak: int) -> Effect:
    """The effect of a cause as it was replayed. ``peak``: bytes."""
    if diagnosed.bound is Bound.OR_MORE and diagnosed.without >= peak:
        return Effect(Certainty.UNTRIED, peak, _UNKNOWN)
    return Effect(
        Certainty.REPLAYED, peak, diagnosed.without, diagnosed.assumed, bound=diagnosed.bound
    )


def saved_bytes(effect: Effect, held: int) -> int:
    """The bytes that a change saves; if that is unknown, or a lower bound, those of the cause's
    memory, ``held``, if that is more.
    """
    if isinstance(effect.after, Unavailable):
        return held
    saved = effect.before - effect.after
    return max(saved, held) if effect.bound is Bound.OR_LESS else saved


def certain_causes(
    site: PeakSite, lives: Biographies, diagnosed: Iterable[Diagnosed]
) -> Iterator[Diagnosed]:
    """The causes, corrected by what the recording has of the whole run; forward passes without
    gradients are one remedy, which is yielded once for a line: the one that calls the model, if it
    is known.
    """
    evaluation = _with_gradients(site)
    rings = [one.holder for one in _kept(site.rank) if one.holder.cycle]
    ring = max(rings, key=lambda one: one.bytes, default=None)
    lines = set()
    for one in diagnosed:
        certain = _certain(one, lives, evaluation, ring)
        if certain.answer.code == NO_GRAD:
            called = certain.kept_at if certain.answer.rule == EVALUATION else None
            line = called or one.group.main.made_at
            if line in lines:
                continue
            lines.add(line)
        yield certain


def _begin_of_step_before(site: PeakSite, mark: HighWater) -> int:
    """The first operator of the last step before that of the mark that was traced; 0 for none."""
    step = mark.ledger.trace.step
    before = [one for one in site.rank.traced_steps() if one.traces and one.index < (step or 0)]
    if not before:
        return 0
    try:
        traces = [t for t in site.rank.traces.of(before[-1]) if t.device == site.device]
    except DataError:
        return 0
    firsts = [trace.events.operator[0] for trace in traces if trace.events.operator]
    return min(firsts, default=0)


def recorded_holders(mark: HighWater) -> dict[int, Holder]:
    """By row of the ledger, what held it when the program, or a step, ended; of memory that was
    allocated after that, what holds older blocks of the same line and size in a container.
    """
    ledger = mark.ledger
    by_event, by_baseline = {}, {}
    for holder, events, baseline in ledger.trace.held:
        by_event.update(dict.fromkeys(events, holder))
        by_baseline.update(dict.fromkeys(baseline, holder))
    if not by_event and not by_baseline:
        return {}
    found = {
        row: by_event[start]
        for row, start in enumerate(ledger.start[: ledger.made])
        if start in by_event
    }
    found.update((ledger.made + row, holder) for row, holder in by_baseline.items())
    return {**found, **_of_the_same_line(mark, found)}


def _of_the_same_line(mark: HighWater, holders: Mapping[int, Holder]) -> dict[int, Holder]:
    """The rows that nothing is known to hold, and that are as large as several others of the same
    stack, which one container holds; and those. How many the container has is unknown then.
    """
    ledger, alive = mark.ledger, mark.ledger.alive(mark.event)
    rows: dict[tuple[int, int], list[int]] = {}
    for row in alive:
        rows.setdefault((ledger.stack[row], ledger.size[row]), []).append(row)
    joined: dict[int, Holder] = {}
    for same in rows.values():
        held = [holders[row] for row in same if row in holders and holders[row].name]
        if not 1 < len(held) < len(same):
            continue
        holder = held[0]
        if holder.container is not None and all(one.owner == holder.owner for one in held):
            path = tuple(replace(step, size=None) for step in holder.path)
            joined.update(dict.fromkeys(same, replace(holder, path=path)))
    return joined


def _certain(
    found: Diagnosed, lives: Biographies, evaluation: Finding | None, ring: Holder | None
) -> Diagnosed:
    """The cause by all that the recording has. ``evaluation``: the finding of one whose forward
    passes keep what a backward pass would use; ``ring``: the reference cycle that held the most
    when a step ended.
    """
    if found.other is not None:
        return found
    group = found.group
    unnamed = group.holder is None or group.holder.root not in _NAMED
    if found.answer.rule == LATE_GRADIENTS and unnamed:
        # Those that outlive the step may be kept by a graph, and are not just freed late.
        kept = sum(block.bytes for block in group.blocks if lives.survives(block.row))
        instead = graphs.diagnose(group) or cycles.diagnose(group) or unneeded(group)
        if 2 * kept > group.bytes and isinstance(instead, Answer):
            return found.answered(instead)
    evaluated = sum(b.bytes for b in group.blocks if is_evaluation(b.phase))
    replaced = found.answer.rule in (UNNEEDED, "kept-graph")
    if replaced and evaluation is not None and 2 * evaluated > group.bytes:
        called = evaluation.location
        other = called is not None and called != group.main.made_at
        at = f" (the model is called at {called})" if other else ""
        return found.answered(
            Answer(
                EVALUATION,
                f"{human_bytes(group.bytes)} from {group.main.made_at} are kept by "
                f"{_graph_of(group)} for a backward pass that does not come: an evaluation "
                f"runs with gradients{at}",
                "run it without gradients",
                NO_GRAD,
                EditKind.NO_GRAD_AT_CALL,
            )
        )._replace(kept_at=called or found.kept_at)
    if found.answer.rule == UNNEEDED and ring is not None:
        # The collector has run since the peak, so that what held these blocks is gone.
        cycle = " → ".join(f"{one.kind}{one.label}" for one in ring.cycle)
        text = (
            f"{found.answer.sentence}. When a step ended, a reference cycle ({cycle}) kept "
            f"{human_bytes(ring.bytes)} until the garbage collector ran"
        )
        return found._replace(answer=replace(found.answer, sentence=text))
    return found


def _graph_of(group: HeldGroup) -> str:
    """The graph that saved memory, by the variable whose graph it is."""
    holder = group.holder
    if holder is None or holder.root not in _NAMED or ".grad_fn" not in holder.name:
        return "autograd graphs"
    where = f" in {holder.function}" if holder.function else ""
    name = f"{holder.name.partition('.grad_fn')[0]}{where}"
    return (
        f"the autograd graphs of {name} and others"
        if group.several
        else (f"the autograd graph of {name}")
    )


def unneeded(group: HeldGroup) -> Answer | None:
    """Memory that is not used again, and whose holder is unknown."""
    main = group.main
    if group.holder is not None or not main.need.needless:
        return None
    if 2 * sum(b.bytes for b in group.blocks if _is_kept_for_a_moment(b)) > group.bytes:
        return None
    if not main.earlier and group.share < LEAST_OF_A_STEP:
        return None  # a variable, as far as is known
    used = "never used" if group.never_used else "not used again"
    last = "" if main.last_use is None else f", last used at {main.last_use}"
    return Answer(
        UNNEEDED,
        f"{human_bytes(group.bytes)} from {main.made_at} are alive and {used}{last}; what holds "
        "them is unknown",
        f"find what keeps the tensors of {main.made_at} alive, and drop them after their last use",
    )


def _is_kept_for_a_moment(block: HeldBlock) -> bool:
    """Whether the backward pass that runs has just used it, or it is a library's, which uses it
    again.
    """
    used = block.phase.partition("/")[0] == "backward" and not block.earlier
    return used or block.category is Category.WORKSPACE


# -- what grows, by what is kept

_LEAST_TRACED: Final = 3
"""The traced steps, at least, of which a holder keeps something, if it grows."""

_NAMED: Final = frozenset(HolderRoot) - {
    HolderRoot.CYCLE,  # which ends with the collector's next run
    HolderRoot.EXCEPTION,
    HolderRoot.AUTOCAST,
    HolderRoot.DDP,
    HolderRoot.OUTSIDE,
}
"""Where a path begins that the program keeps."""


class _KeptBy(NamedTuple):
    holder: Holder
    steps: dict[int, int]
    """By traced step that made a part, of how many blocks."""
    sizes: list[int]
    """The elements of the container as the program ran."""
    searched: int | None
    """The step after which the program was last searched; None if that is unknown."""
    events: dict[str, list[int]]
    """By trace, the allocations."""

    def grows(self, traced: list[int]) -> bool:
        """Whether more is kept as the program runs. ``traced``: the steps that have traces."""
        first = self.steps.get(traced[0], 0) if len(traced) > 1 else 0
        if 2 * first > sum(self.steps.values()):
            return False  # a model, or figures of metrics, that the first step made for all others
        if len(self.sizes) > 1:
            return self.sizes == sorted(set(self.sizes))
        if len(self.steps) < _LEAST_TRACED:
            return False
        # A window over the last steps keeps none of the first ones.
        early, middle = traced[len(traced) // 3], traced[(len(traced) - 1) // 2]
        return min(self.steps) <= early and max(self.steps) > middle


def _kept(rank: RankRecording) -> list[_KeptBy]:
    """What each holder keeps that no later step has used."""
    step_of = {name: step.index for step in rank.traced_steps() for name in step.traces}
    found: dict[tuple[object, ...], _KeptBy] = {}
    for name, held in rank.held.items():
        for rows in held:
            holder = rows.holder
            key = holder.root, holder.name, holder.function, holder.kept
            sizes = [size for _, size in rows.sizes]
            searched = rows.sizes[-1][0] if rows.sizes else None
            kept = found.setdefault(key, _KeptBy(holder, {}, sizes, searched, {}))
            if rows.events and name in step_of:
                step = step_of[name]
                kept.events.setdefault(name, []).extend(rows.events)
                kept.steps[step] = kept.steps.get(step, 0) + len(rows.events)
    return list(found.values())


def _is_used(rank: RankRecording, device: str, one: _KeptBy) -> bool:
    """Whether the last traced step, such as what follows training, uses half of it or more."""
    used: set[int] = set()
    made: set[int] = set()
    try:
        for step in rank.traced_steps():
            for name, trace in zip(step.traces, rank.traces.of(step), strict=False):
                if trace.device != device:
                    continue
                made |= {trace.events.made[event] for event in one.events.get(name, ())}
                lives = Biographies(ledger_of(trace)) if step is rank.traced_steps()[-1] else None
                if lives is not None:
                    rows = filter(lives.used_here, range(len(lives.ledger)))
                    used |= {lives.made[row] for row in rows}
    except DataError:
        return False
    return bool(made) and 2 * len(made & used) >= len(made)


def _container(holder: Holder) -> str:
    """The name of what holds it, whichever element it is: ``self.cache[]``."""
    return re.sub(r"\[[^\]]*\]", "[]", holder.name)


def kept_causes(site: PeakSite, known: Sequence[MemoryCause]) -> Iterator[MemoryCause]:
    """The holders that keep more and more, though it may be a small part of the peak: it has no
    end. Those of ``known`` causes are left out.
    """
    traced = [step.index for step in site.rank.traced_steps() if step.traces]
    names = tuple(_container(cause.holder) for cause in known if cause.holder is not None)
    peak = 0 if isinstance(site.amount, Unavailable) else site.amount.at_least
    for one in sorted(_kept(site.rank), key=lambda one: -one.holder.bytes):
        holder = one.holder
        if holder.root not in _NAMED or holder.kept is Kept.GRAD:
            continue
        if any(name.startswith(_container(holder)) for name in names):
            continue  # the same container, or what one of its elements keeps
        if not one.grows(traced) or holder.bytes * MANY_STEPS < LEAST_EFFECT * peak * len(traced):
            continue
        if _is_used(site.rank, site.device, one):
            continue
        count = len(site.rank.steps)
        early = one.searched is not None and one.searched + 1 < count
        when = f" (last searched after step {one.searched}, of {count} steps)" if early else ""
        sentence = (
            f"{kept_in(holder)} grows with the steps{when}, and nothing uses what it keeps: "
            f"{holder.contents} of the traced steps"
        )
        answer = Answer(GROWTH, sentence, *_keep_none(holder))
        yield _untried(answer, holder.bytes, holder.tensors, peak, _BY_STEPS, holder=holder)


def waits_for_collector(rank: RankRecording) -> int:
    """The bytes that only reference cycles held when the program, or a step, ended."""
    return sum(one.holder.bytes for one in _kept(rank) if one.holder.root is HolderRoot.CYCLE)


# -- recordings without uses


@dataclass(frozen=True, slots=True)
class _Grown:
    bytes: int
    steps: int
    sentence: str
    line: Place | None
    of_state: bool
    """Whether most of it is optimizer state."""
    blocks: int = 0


def growth_cause(
    site: PeakSite, growth: Growth | None, leak: LeakRow | None
) -> Iterator[MemoryCause]:
    """The cause of growth in a recording without uses: from the ends of its steps, or from the line
    ``leak`` that leaves most behind.
    """
    grown = _leaked(site, leak) if growth is None else _grown(site, growth)
    if grown is None:
        return
    kept = _keeper(site, grown)
    sentence = grown.sentence
    code = ""
    if grown.of_state:
        remedy = "limit the size of the optimizer's state (for L-BFGS, with history_size)"
        sentence += "; most of it is optimizer state, which grows with every step"
        kept = None
    elif kept is not None:
        sentence += f"; when last searched, {kept.place} held {kept.contents}"
        remedy, code = _keep_none(kept)
    else:
        where = f" that {grown.line} allocates" if grown.line else ""
        remedy = (
            f"find what keeps the tensors{where} alive from step to step, such as a list of losses "
            "that were not detached, or a cache without a limit"
        )
    amount = site.amount
    peak = 0 if isinstance(amount, Unavailable) else amount.at_least
    yield _untried(
        Answer(GROWTH, sentence, remedy, code),
        grown.bytes,
        grown.blocks,
        peak,
        _BY_STEPS,
        made_at=grown.line or NoPlace.UNKNOWN,
        holder=kept,
    )


def _keeper(site: PeakSite, grown: _Grown) -> Holder | None:
    """What holds what has grown, as far as the recording knows. If the program ended with an error,
    the frames of its traceback are those that ran: their variables held it before that error did.
    """
    end = site.rank.end
    kept = None if end is None else keeper(end.holders, grown.steps, grown.bytes)
    if kept is None or end is None or end.error is None or kept.root is not HolderRoot.EXCEPTION:
        return kept
    ended_by = end.error.type.rpartition(".")[2] == kept.error.rpartition(".")[2]
    return replace(kept, root=HolderRoot.LOCAL) if ended_by else kept


def _grown(site: PeakSite, growth: Growth) -> _Grown:
    lines = (line for line in growth.lines if line.bytes > 0)
    line, held = next(
        ((one.key, one.bytes) for one in lines if isinstance(one.key, Place)), (None, 0)
    )
    sentence = (
        f"memory grows by {human_bytes(growth.per_step)} a step: {human_bytes(growth.bytes)} from "
        f"the end of step {growth.first} to that of step {growth.last}"
    )
    if line is not None:
        sentence += f", {human_bytes(held)} of it from {line}"
    of_state = 2 * _state_growth(site, growth.first, growth.last) > growth.bytes
    return _Grown(growth.bytes, growth.last - growth.first, sentence, line, of_state)


def _leaked(site: PeakSite, leak: LeakRow | None) -> _Grown | None:
    """Of runs that are too short, or too uneven, for the ends of their steps to show growth."""
    amount = site.amount
    if leak is None or not isinstance(leak.key, Place) or isinstance(amount, Unavailable):
        return None
    if leak.bytes < MINIMUM_SHARE * amount.at_least:
        return None
    rise = rise_of(site)
    if rise is not None and rise < leak.bytes_per_step:
        return None  # few steps have a trace: after these, memory did not grow
    sentence = (
        f"{human_bytes(leak.bytes)} from {leak.key} outlived their steps: "
        f"{human_bytes(leak.bytes_per_step)} a step"
    )
    last = site.rank.steps[-1].index if site.rank.steps else 0
    of_state = 2 * _state_growth(site, last - 1, last) > leak.bytes_per_step
    return _Grown(leak.bytes, last, sentence, leak.key, of_state, leak.blocks)


def _state_growth(site: PeakSite, first: int, last: int) -> int:
    """The growth of the optimizer's state from the end of step ``first`` to that of ``last``.
    Bytes; 0 if unknown.
    """
    held = [
        tensors.by_category.get(Category.OPTIMIZER_STATE, 0)
        for row, index in enumerate(site.rank.columns.number(*INDEX))
        if index in (first, last)
        for step in site.rank.steps[row : row + 1]
        for tensors in step.tensors
        if tensors.device == site.device
    ]
    return max(0, held[-1] - held[0]) if len(held) > 1 else 0


def _keep_none(kept: Holder) -> tuple[str, str]:
    """The remedy for a container or variable that grows, in words and as code."""
    where = kept_in(kept) if kept.name.endswith("]") else kept.place  # not one element
    if kept.of_graph:
        return (
            f"keep no autograd graph in {where}: add numbers (loss.item()), or tensors "
            "without their graph",
            ".detach()",
        )
    instead = "copies on the CPU without their graph"
    if kept.bytes <= _A_NUMBER * kept.tensors:
        instead = f"keep numbers (loss.item()), or {instead}"
    elif kept.kind in BY_KEY:
        return (
            f"limit the entries of {where}, or keep {instead} if nothing on the GPU reads them",
            "",
        )
    else:
        instead = f"drop those that are not needed any more, or keep {instead}"
    return f"keep no tensors in {where}: {instead}", ".detach().cpu()"


_MORE_THAN_TRAINING = 1.5
"""How many times the peak of the training steps a peak after them must be, to be one of another
kind."""


def evaluation_cause(site: PeakSite, mark: HighWater | Unavailable) -> MemoryCause | None:
    """The cause, if most of the peak is that of forward passes that keep what a backward pass would
    use, and none follows; from counters, the model's mode, and, where the trace has it, the grad
    mode of what was allocated at the peak.
    """
    if not site.device.startswith("cuda") or isinstance(site.amount, Unavailable):
        return None
    found = _evaluated(site) or _after_training(site)
    if found is None or 2 * found[0] < site.amount.at_least:
        return None
    if not isinstance(mark, Unavailable) and 2 * _without_gradients(mark) > found[0]:
        return None
    grown, sentence = found
    answer = Answer(
        EVALUATION,
        sentence,
        "if these forward passes train nothing, run them without gradients: otherwise each keeps "
        "its activations for as long as its result is kept",
        NO_GRAD,
    )
    why = "what the run needs then is unknown from its recording"
    return _untried(answer, grown, 0, site.amount.at_least, why)


def _without_gradients(mark: HighWater) -> int:
    """The bytes at the peak that were allocated while gradients were disabled."""
    ledger = mark.ledger
    if not ledger.trace.events.grad:
        return 0
    rows = ledger.alive(mark.event)
    modes = zip(ledger.values("grad", rows), mark.size, strict=True)
    return sum(size for mode, size in modes if mode == GRAD_OFF)


def _evaluated(site: PeakSite) -> tuple[int, str] | None:
    """What an evaluation with gradients took at the peak, and the sentence."""
    finding = _with_gradients(site)
    if finding is None or site.step is None or not is_evaluation(site.phase):
        return None
    phases = [one for one in site.step.phases if one.path == EVALUATION]
    windows = [window_of(one.windows, site.device) for one in phases]
    starts = [one.start.allocated for one in windows if one is not None]
    known = [start for start in starts if isinstance(start, int)]
    if not known or isinstance(site.amount, Unavailable):
        return None
    grown = site.amount.at_least - min(known)
    where = "" if finding.location is None else f" (called at {finding.location})"
    return grown, (
        f"{human_bytes(grown)} were allocated by an evaluation: the model{where} is in eval mode, "
        "and keeps what a backward pass would use"
    )


def _with_gradients(site: PeakSite) -> Finding | None:
    found = site.rank.findings
    return next((one for one in found if one.rule == WITH_GRADIENTS.id), None)


def _after_training(site: PeakSite) -> tuple[int, str] | None:
    """What was allocated after the last training step, without a backward pass, if that step
    peaks higher than training; and the sentence.
    """
    step, device = site.step, site.device
    if step is None or step.ended_by != "end" or isinstance(site.amount, Unavailable):
        return None
    if {"backward", "optimizer"} & {phase.path.partition("/")[0] for phase in step.phases}:
        return None
    trained = [
        window.peak_allocated.at_most
        for one in site.rank.steps
        if one.ended_by == "optimizer"
        for window in one.windows
        if window.device == device and isinstance(window.peak_allocated, Peak)
    ]
    window = window_of(step.windows, device)
    start = None if window is None else window.start.allocated
    if not trained or not isinstance(start, int):
        return None
    peak = site.amount.at_least
    if peak < _MORE_THAN_TRAINING * max(trained):
        return None
    return peak - start, (
        f"after step {step.index - 1}, {human_bytes(peak - start)} were allocated without a "
        "backward pass, as in an evaluation without no_grad; the training steps needed at most "
        f"{human_bytes(max(trained))}"
    )


_GRADIENTS = 0.05
"""The share of the peak from which gradients in a forward pass are worth a cause."""


def gradients_cause(site: PeakSite, mark: HighWater) -> MemoryCause | None:
    """The cause, if gradients are alive at a peak in a forward pass; by categories alone."""
    phase = site.phase if mark.ledger.trace.step == site.step_index else mark.phase
    held = next((s for s in by_category(mark) if s.key == Category.GRADIENT.value), None)
    if phase.partition("/")[0] not in ("forward", EVALUATION) or held is None:
        return None
    if held.bytes < _GRADIENTS * mark.allocated:
        return None
    answer = Answer(
        LATE_GRADIENTS,
        f"{human_bytes(held.bytes)} of gradients are alive in the forward pass",
        "free them before it, unless they are accumulated over several backward passes",
        "optimizer.zero_grad(set_to_none=True)",
    )
    why = "the uses of memory were not traced"
    return _untried(answer, held.bytes, held.blocks, mark.allocated, why)
