"""The causes of a failed check: the program runs with parts of its change reverted."""

from __future__ import annotations

import math
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Final

from gpuprobe.analysis.baseline.model import (
    Baseline,
    CheckResult,
    MetricResult,
    important_first,
    simulated_gpu,
)
from gpuprobe.analysis.blame.blame import SourceGraph
from gpuprobe.analysis.blame.hunks import (
    Hunk,
    dependents,
    described,
    halves,
    hunks_of,
    tree_without,
)
from gpuprobe.analysis.blame.search import Found, OverBudget, Taken, Tried, likely_first, search
from gpuprobe.analysis.blame.source import GAP, ChangedLine, changes, source_of
from gpuprobe.analysis.compare.causes import Cause
from gpuprobe.errors import EnvironmentUnavailable
from gpuprobe.gate.history import BaselineHistory, committed_texts
from gpuprobe.gate.sources import ignored_by_git, text_of
from gpuprobe.model.place import Place, parse_place
from gpuprobe.model.text import amount, human_bytes

if TYPE_CHECKING:
    from gpuprobe.api.trials import Trials
    from gpuprobe.gate.plan import CheckPlan
    from gpuprobe.gate.trials import TrialFigures

_TIMES: Final = 2.0
"""The default budget of the trials, as a multiple of the check's duration."""

_MOST_CAUSES: Final = 3
_LEFT: Final = 0.02
"""The share of a growth from which it is reported as unexplained."""

_NEW_ENVIRONMENT: Final = ("torch", "allocator", "device")


@dataclass(frozen=True)
class BlameOptions:
    """Options of the search for a cause. ``budget``: seconds, None for twice the time of the check,
    which started at ``began`` (`time.monotonic`). ``progress`` gets a line before each run."""

    budget: float | None = None
    began: float = field(default_factory=time.monotonic)
    progress: Callable[[str], None] = lambda text: None

    def deadline(self) -> float:
        """The time by which the last run must end."""
        now = time.monotonic()
        return now + (_TIMES * (now - self.began) if self.budget is None else self.budget)


@dataclass(frozen=True)
class _Change:
    """The program's files before and after, and their differences."""

    old: Mapping[str, str]
    new: Mapping[str, str]
    hunks: tuple[Hunk, ...]
    needed: tuple[Taken, ...]
    lines: tuple[ChangedLine, ...]

    @cached_property
    def halves(self) -> tuple[Taken, ...]:
        """For each hunk, the hunks that belong to the same edit."""
        return halves(self.hunks, self.new)

    @property
    def tried(self) -> list[int]:
        """The numbers of the hunks that can make a difference."""
        return [
            number
            for number, hunk in enumerate(self.hunks)
            if not hunk.neutral and hunk.within is None
        ]

    def edits_of(self, hunk: int, order: Sequence[int]) -> list[int]:
        """A hunk that adds or uses a copy of a definition: the edits within that copy, in this
        ``order``, which need no hunk but each other. Empty for an edit."""
        if self.hunks[hunk].within is not None:
            return []
        copies = {
            (copy.file, copy.start, copy.end)
            for number, copy in enumerate(self.hunks)
            if copy.within is None and hunk in self.needed[number]
        }
        here = {
            number
            for number, edit in enumerate(self.hunks)
            if edit.within is not None and not edit.neutral and (edit.file, *edit.within) in copies
        }
        while True:
            alone = {number for number in here if self.needed[number] <= here}
            if alone == here:
                return [number for number in order if number in here]
            here = alone


def change_of(
    before: Baseline,
    after: Baseline,
    root: str,
    committed: BaselineHistory | None,
    *,
    test: bool = False,
) -> _Change | str:
    """The changes to the project since the baseline, from the texts in the baseline and in the
    repository; or why they are unknown. ``test``: the baseline is that of a test of pytest, which
    never has texts."""
    now = after.texts
    if not now:
        return "the sources of this run are unknown"
    old = before.texts
    if committed is not None:
        unknown = {name for name, kept in before.files.items() if kept.text is None}
        required = unknown | (now.keys() - before.files.keys()) | set(committed.settings)
        old.update(committed_texts(committed, before.files, required, root))
    if not old:
        return _without_sources(committed, test)
    ignored = ignored_by_git(now.keys() - old.keys(), root)  # a baseline contains no ignored files
    new = {name: text for name, text in now.items() if name not in ignored}
    for name in old.keys() - new.keys():
        text = text_of(Path(root, name))
        if text is not None:
            new[name] = text
    missing = [name for name, kept in before.files.items() if name not in old and name in new]
    if missing and any(before.files[name].digest != after.files[name].digest
                       for name in missing if name in after.files):  # fmt: skip
        return f"the baseline has no text of {missing[0]}"
    hunks = hunks_of(old, new)
    sources = (
        {name: source_of(text) for name, text in side.items() if name.endswith(".py")}
        for side in (old, new)
    )
    return _Change(old, new, hunks, dependents(hunks, old, new), changes(*sources))


def _without_sources(committed: BaselineHistory | None, test: bool) -> str:
    """Why there are no texts of the program as it was."""
    if not test:
        return (
            "the baseline has no sources, and no commit of a repository has them "
            "(gpuprobe baseline update adds them)"
        )
    if committed is None:
        return "the baselines of tests have no sources, and this one is in no commit of git"
    return (
        "the baselines of tests have no sources, and this one was measured with others than those "
        f"in its commit, {committed.commit[:8]}"
    )


class Blaming:
    """The trials of one failed check. ``root``: the project's folder."""

    def __init__(self, change: _Change, trials: Trials, options: BlameOptions) -> None:
        self._change = change
        self._trials = trials
        self._options = options
        self._deadline = math.inf
        self._known: dict[Taken, TrialFigures] = {}
        self._over = False

    def repeated(self) -> TrialFigures:
        """Run the program with nothing reverted, in the trials' copy of the project; return its
        figures. The budget of the trials starts after this run."""
        figures = self._figures(Taken())
        self._deadline = self._options.deadline()
        return figures

    def _figures(self, taken: Taken) -> TrialFigures:
        if taken in self._known:
            return self._known[taken]
        left = self._deadline - time.monotonic()
        if left <= 0:
            self._over = True
            raise OverBudget
        change = self._change
        if taken:
            first = self._place(change.hunks[min(taken)])
            more = f" and {len(taken) - 1} more" if len(taken) > 1 else ""
            self._options.progress(
                f"run {self._trials.runs} of the search for the cause, {left:.0f} s left: without "
                f"{first}{more}"
            )
        hunks = [change.hunks[number] for number in sorted(taken)]
        figures = self._trials.run(
            tree_without(hunks, change.old, change.new), min(left, _LONGEST_RUN)
        )
        if figures.failed and time.monotonic() >= self._deadline:
            self._over = True
            raise OverBudget
        self._known[taken] = figures
        return figures

    def _value(self, taken: Taken, name: str) -> int | None:
        figures = self._figures(taken)
        if figures.failed:
            return None
        return figures.metrics.get(name, figures.phases.get(name))

    def _partners(self, hunk: int, taken: Taken) -> Taken:
        """The hunks to revert together with a hunk after a run that failed: those with a name that
        the error quotes; otherwise its neighbours in the file, one and then more."""
        known = self._known.get(taken)
        if known is None or not known.failed:
            return Taken()
        change = self._change
        others = [number for number in change.tried if number not in taken]
        quoted = set(_QUOTED.findall(known.failed))
        found = [n for n in others if quoted & set(_WORD.findall(_text_of(change.hunks[n])))]
        if not found:
            here = change.hunks[hunk]
            found = [n for n in others if change.hunks[n].file == here.file]
            found.sort(key=lambda n: abs(change.hunks[n].start - here.start))
            found = found[: len(taken)]
        return Taken(found)

    def explained(self, result: CheckResult, before: Baseline, after: Baseline) -> CheckResult:
        """The result with the causes of each metric above the baseline."""
        tried = self._change.tried
        first: list[int] = []
        found: dict[str, MetricResult] = {}
        new = [f"{key} {before.environment.get(key, '')!r} in the baseline, "
               f"{after.environment.get(key, '')!r} now" for key in _NEW_ENVIRONMENT
               if before.environment.get(key, "") != after.environment.get(key, "")]  # fmt: skip
        for metric in result.regressions:
            places = [parse_place(cause.place) for cause in metric.causes if cause.place]
            likely = likely_first(
                self._change.hunks, [place for place in places if isinstance(place, Place)]
            )
            order = [n for n in likely if n in tried]
            order.sort(key=lambda n: first.index(n) if n in first else len(first))
            floor = metric.before
            outside = 0
            if new:
                try:
                    value = self._value(Taken(tried), metric.name) if tried else metric.after
                except OverBudget:
                    value = None
                if value is not None:
                    outside = value - metric.before
                    floor = value
            causes = search(
                order,
                self._change.needed,
                floor,
                metric.after,
                lambda taken, name=metric.name: self._value(taken, name),  # type: ignore[misc]
                partners=self._partners,
                halves=lambda hunk: self._change.halves[hunk],
                inside=lambda hunk, likely=likely: self._change.edits_of(hunk, likely),  # type: ignore[misc]
            )
            first += [n for cause in causes.causes for n in cause.hunks[:1] if n not in first]
            found[metric.name] = self._worded(metric, causes, order, new, outside)
        metrics = tuple(found.get(item.name, item) for item in result.metrics)
        phases = tuple(found.get(item.name, item) for item in result.phases)
        cause = next((item.cause for item in found.values() if item.cause), result.cause)
        return replace(
            result, metrics=metrics, phases=phases, cause=cause, trials=self._summary(tried)
        )

    def _summary(self, tried: Sequence[int]) -> str:
        runs = sum(1 for taken in self._known if taken)
        failed = sum(1 for figures in self._known.values() if figures.failed)
        text = (
            f"{runs} run{'s' * (runs != 1)} of the {self._trials.what} with parts of its "
            f"{len(tried)} change{'s' * (len(tried) != 1)} reverted"
        )
        if failed:
            text += f"; {failed} of them failed"
        return f"{text}; over the budget (--blame-budget)" if self._over else text

    # -- in words

    def _worded(
        self,
        metric: MetricResult,
        found: Found,
        order: Sequence[int],
        new: Sequence[str],
        outside: int,
    ) -> MetricResult:
        growth = metric.delta
        causes = [self._cause(metric, tried, at) for at, tried in enumerate(found.causes)]
        rest = growth - outside - found.together
        if new and outside > growth * _LEFT:
            text = (
                f"{'; '.join(new)}: {amount_of(outside, growth, metric.unit)} remain with every "
                "change of the program reverted"
            )
            cause = Cause(text, saved=outside)
            causes.insert(0 if outside > (causes[0].saved or 0 if causes else 0) else 1, cause)
        if not causes:
            return self._not_found(metric, found, order)
        if len(found.causes) > 1:
            together = amount_of(found.together, growth, metric.unit)
            causes.append(Cause(f"all of these together save {together}"))
        if rest > growth * _LEFT:
            text = f"{amount_of(rest, growth, metric.unit)} unexplained"
            if not found.complete:
                text += ": over the budget (--blame-budget)"
            elif found.floor is not None and found.floor - metric.before > growth * _LEFT:
                text += (
                    ": it remains with every change of the project's files reverted "
                    "(packages, data, environment)"
                )
            causes.append(Cause(text))
        listed = (*causes[:_MOST_CAUSES], *(c for c in causes[_MOST_CAUSES:] if not c.place))
        return replace(
            metric,
            cause=causes[0].text,
            place=causes[0].place,
            causes=(*listed, *self._without_a_figure(metric, found, order)),
            unexplained=max(0, rest),
        )

    def _without_a_figure(
        self, metric: MetricResult, found: Found, order: Sequence[int]
    ) -> list[Cause]:
        """The likeliest change as a cause, if the program fails without it, and if it is likelier
        than all causes that were measured. Empty otherwise."""
        known = {number for tried in found.causes for number in tried.hunks}
        first = min((order.index(at) for at in known if at in order), default=0)
        for number in order[:first]:
            figures = self._known.get(self._change.needed[number])
            if number not in known and figures is not None and figures.failed:
                hunk = self._change.hunks[number]
                place = place_of(hunk, self._change, metric.causes)
                text = f"{place} ({described(hunk)}): the {self._trials.what} fails without it"
                return [Cause(f"not measured: {text}: {figures.failed}", place)]
        return []

    def _cause(self, metric: MetricResult, tried: Tried, at: int) -> Cause:
        hunks = [self._change.hunks[number] for number in tried.hunks]
        if metric.unit == "ns":  # the line that takes the time comes before those it needs
            hunks.sort(key=lambda hunk: _first_in(hunk, metric.causes))
        place = place_of(hunks[0], self._change, metric.causes)
        text = f"reverting {place} ({described(hunks[0])})"
        if len(hunks) > 1:
            text += f" together with {', '.join(self._place(hunk) for hunk in hunks[1:4])}"
            if len(hunks) > 4:
                text += f" and {len(hunks) - 4} more"
        if not tried.alone:
            text += " as well"
        text += f" saves {amount_of(tried.saved, metric.delta, metric.unit)}"
        if metric.name == "growth_per_step":
            text += " requested per step"
        if tried.saved > metric.delta * (1 + _LEFT):
            text += ", more than the growth, because other changes save memory"
        largest = next((row for row in metric.rows or () if row.delta > 0), None)
        if not at and largest is not None and largest.key != place and largest.key[0] != "(":
            verb = _VERBS.get(metric.unit, "made")
            text += f"; most of the growth is {verb} at {largest.key}"
        return Cause(text, place, tried.saved)

    def _not_found(self, metric: MetricResult, found: Found, order: Sequence[int]) -> MetricResult:
        """The metric if no trial removed the growth."""
        if not found.complete:
            return self.ranked(metric, order, "over the budget (--blame-budget)")
        growth = amount_of(metric.delta, metric.delta, metric.unit)
        if not order:
            text = "no file of the program has changed since the baseline"
        elif found.floor is not None:
            text = "reverting every change of the project's files does not lower it"
        else:
            failed = next((row.failed for row in self._known.values() if row.failed), "")
            return self.ranked(
                metric, order, f"the {self._trials.what} fails without them: {failed}"
            )
        outside = Cause(f"{growth}: {text} (packages, data, environment)")
        return replace(
            metric,
            cause=f"{outside.text}; {metric.cause}" if metric.cause else outside.text,
            causes=(*metric.causes[:_MOST_CAUSES], outside),
            unexplained=metric.delta,
        )

    def ranked(self, metric: MetricResult, order: Sequence[int], reason: str) -> MetricResult:
        """The metric with the hunks of ``order`` as causes; none was tried."""
        return ranked(metric, self._change, order, reason)

    def _place(self, hunk: Hunk) -> str:
        return place_of(hunk, self._change)


_LONGEST_RUN: Final = 86_400.0  # seconds

_WORD: Final = re.compile(r"[^\W\d]\w*")
_QUOTED: Final = re.compile(r"['\"`]([^\W\d]\w*)['\"`]")


def _text_of(hunk: Hunk) -> str:
    return "".join((*hunk.old, *hunk.new))


def ranked(
    metric: MetricResult,
    change: _Change,
    order: Sequence[int],
    reason: str,
) -> MetricResult:
    """The metric with the hunks of ``order`` as its causes, each with the text of a cause known at
    its place. None was tried, for this ``reason`` ("" if the user disabled trials)."""
    by_place = {_file_and_line(cause.place): cause for cause in metric.causes}
    causes = []
    for number in order[:_MOST_CAUSES]:
        hunk = change.hunks[number]
        at = place_of(hunk, change, metric.causes)
        known = by_place.get(_file_and_line(at))
        causes.append(known or Cause(f"at {at}: {described(hunk)}, which may be related", at))
    if not causes:
        return metric
    suffix = f" (not tried: {reason})" if reason else ""
    first = replace(causes[0], text=f"{causes[0].text}{suffix}")
    return replace(metric, cause=first.text, place=first.place, causes=(first, *causes[1:]))


def without_trials(result: CheckResult, change: _Change | str, reason: str) -> CheckResult:
    """The result without trials, with the causes ranked by rules."""
    if isinstance(change, str):
        return replace(result, trials=f"changes were not tried: {change}")
    tried = change.tried

    def of(metric: MetricResult) -> MetricResult:
        if not metric.regressed:
            return metric
        places = [parse_place(cause.place) for cause in metric.causes if cause.place]
        order = likely_first(change.hunks, [item for item in places if isinstance(item, Place)])
        order = [number for number in order if number in tried]
        return ranked(metric, change, order, reason)

    metrics, phases = (tuple(map(of, items)) for items in (result.metrics, result.phases))
    important = important_first(metrics, phases)
    cause = next((metric.cause for metric in important if metric.cause), result.cause)
    return replace(
        result,
        metrics=metrics,
        phases=phases,
        cause=cause,
        trials=f"changes were not tried: {reason or 'switched off'}",
    )


def _file_and_line(place: str) -> str:
    return place.partition(" in ")[0]


_VERBS: Final = {"bytes": "allocated", "ns": "spent"}
"""What a line does with a metric's unit; calls are made."""


def _first_in(hunk: Hunk, causes: Sequence[Cause]) -> int:
    """The index of the first cause whose line is in the hunk; their number if none is."""
    for at, cause in enumerate(causes):
        known = parse_place(cause.place)
        if not isinstance(known, Place) or known.file != hunk.file:
            continue
        if hunk.start <= known.line < hunk.end:
            return at
    return len(causes)


def place_of(hunk: Hunk, change: _Change, causes: Sequence[Cause] = ()) -> str:
    """The most informative line of a hunk, as ``file:line in function``: the first of ``causes`` in
    it, if any."""
    for cause in causes:
        known = parse_place(cause.place)
        if not isinstance(known, Place) or known.file != hunk.file:
            continue
        if hunk.start <= known.line < hunk.end:
            return cause.place
    lines = [
        item
        for item in change.lines
        if item.file == hunk.file
        and (hunk.start <= item.line < hunk.end or (item.kind == GAP and not hunk.new
             and abs(item.line - hunk.start) <= 2))
    ]  # fmt: skip
    line = min((item.line for item in lines if item.kind != GAP), default=0)
    line = line or min((item.line for item in lines), default=hunk.line)
    if not hunk.file.endswith(".py"):
        return str(Place(hunk.file, max(1, hunk.line)))
    graph = SourceGraph({hunk.file: source_of(change.new.get(hunk.file, ""))})
    node = graph.at(hunk.file, line)
    facts = graph.facts.get(node) if node is not None else None
    function = (facts.opens or facts.scope).rpartition(".")[2] if facts is not None else ""
    return str(Place(hunk.file, line, function or "<module>"))


def amount_of(part: int, whole: int, unit: str) -> str:
    """``1.21 of 1.24 GiB``: three digits, in the unit of the whole if they fit."""
    if unit == "ns":
        one, two = amount(part, unit), amount(whole, unit)
        same = two[two.index(" ") :]
        return f"{one.removesuffix(same)} of {two}"
    if unit != "bytes":
        return f"{part} of {whole}"
    power = min(4, max(0, (abs(whole).bit_length() - 1) // 10))
    size = 1 << (10 * power)
    if abs(part) * 100 < size:
        return f"{human_bytes(part)} of {human_bytes(whole)}"
    if not power:
        return f"{part} of {whole} B"
    return f"{_digits(part / size)} of {_digits(whole / size)} {_UNITS[power]}"


_UNITS: Final = ("B", "KiB", "MiB", "GiB", "TiB")


def _digits(number: float) -> str:
    """A number with at least three digits."""
    if not number:
        return "0"
    return f"{number:.{max(0, 2 - math.floor(math.log10(abs(number))))}f}"


def with_causes(
    result: CheckResult,
    before: Baseline,
    after: Baseline,
    plan: CheckPlan,
    found: BaselineHistory | None,
    options: BlameOptions | None,
    repeat: Callable[[Sequence[TrialFigures]], CheckResult],
) -> CheckResult:
    """A failed check with its causes. ``options``: None to run nothing. ``repeat`` confirms the
    regressions in another run. It gets the figures of the trials' first run, if there was one; that
    run happens without a budget too, as a run in a new process would take longer."""
    root = os.path.realpath(plan.root or Path.cwd())
    change = change_of(before, after, root, found, test=bool(plan.test))
    if not plan.command:
        return without_trials(repeat(()), change, "a recording cannot be run again")
    if isinstance(change, str):
        return without_trials(repeat(()), change, change)
    off = options is None or (options.budget is not None and options.budget <= 0)
    if options is None or (off and (plan.test or plan.repeat == 1)):
        return without_trials(repeat(()), change, "")
    from gpuprobe.api.trials import Trials

    with ExitStack() as stack:
        gpu = simulated_gpu(after.environment.get("device", "")) or ""
        try:
            trials = stack.enter_context(Trials(plan, root, gpu))
            blaming = Blaming(change, trials, options)
            again = blaming.repeated()
        except EnvironmentUnavailable as error:
            return without_trials(repeat(()), change, str(error))
        same = not again.failed and all(
            abs(again.metrics.get(item.name, again.phases.get(item.name, -1)) - item.after)
            <= abs(item.delta) * _LEFT
            for item in result.regressions
        )
        result = repeat((again,) if same else ())
        if not result.regressions:
            return result
        if off:
            return without_trials(result, change, "")
        if not same:
            reason = again.failed or "it needs other memory in a copy of the project"
            return without_trials(result, change, reason)
        return blaming.explained(result, before, after)
