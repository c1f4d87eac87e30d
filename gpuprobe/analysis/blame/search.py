"""Finds the hunks of a change that made a figure grow, by runs with some hunks reverted.

Candidates are tried in the order of their prior (`likely_first`): likely ones alone, and many in
groups; a group that saves something is split until single hunks are left. A hunk that does not run
without others is reverted together with them: those that depend on it according to the text
(`dependents`), and after a failed run those that its error refers to. Hunks that only save
something together (two hunks that raise two peaks of one height) are found by starting from all
hunks and leaving out those that are not needed (Zeller's ddmin: "Simplifying and Isolating
Failure-Inducing Input", 2002).

The prior: a change of the meaning of other lines (how long a tensor lives, what autograd keeps, the
number format, a setting) comes before a line that allocates, whose bytes may have moved to it.
Within that, hunks are in the order of `Blame`: by the distance of a changed line to what grew.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from gpuprobe.analysis.blame.hunks import Hunk
from gpuprobe.model.place import Place

Taken = frozenset[int]
"""The indices of hunks that are reverted."""

_EXPLAINED: Final = 0.02
"""The share of the growth that may stay unexplained, and that a hunk must save to be a cause."""

_MOST_CAUSES: Final = 5

_FEW: Final = 8
"""Up to so many hunks are tried one by one; more are tried in groups that double in size."""

_MOST_PARTNERS: Final = 2
"""How often a hunk that does not run alone is tried with more partners."""

Partners = Callable[[int, Taken], Taken]
"""(hunk, the hunks reverted in a failed run) -> the hunks to revert as well."""


class OverBudget(Exception):
    """The budget of runs is used up."""


@dataclass(frozen=True, slots=True)
class Tried:
    """A cause: reverting ``hunks``, the likeliest first, lowers the figure by ``saved``. ``alone``:
    without reverting the causes before it.
    """

    hunks: tuple[int, ...]
    saved: int
    alone: bool = True


@dataclass(frozen=True, slots=True)
class Found:
    """The result of a search. ``causes``: the one that saves most first. ``together``: what all of
    them save at once. ``rest``: the growth that they leave. ``floor``: the figure with all hunks
    reverted, None if there was no such run. ``complete``: the budget was sufficient.
    """

    causes: tuple[Tried, ...]
    together: int
    rest: int
    floor: int | None = None
    complete: bool = True


def search(
    order: Sequence[int],
    needed: Sequence[Taken],
    before: int,
    after: int,
    run: Callable[[Taken], int | None],
    least: int = 0,
    partners: Partners = lambda hunk, taken: Taken(),
    halves: Callable[[int], Taken] = lambda hunk: Taken(),
    inside: Callable[[int], Sequence[int]] = lambda hunk: (),
) -> Found:
    """The causes of a growth from ``before`` to ``after``.

    ``order``: the hunks, the likeliest first. ``needed``: for each hunk, those that have to be
    reverted together. ``run`` returns the figure with some hunks reverted, or None if the program
    fails without them; it raises `OverBudget`. ``least``: savings up to this are ignored.
    ``halves``: for a hunk, those that form one edit. One of them alone may save more than
    the growth, because the program without it is neither the old nor the new one. ``inside``: for
    a hunk that adds or uses a copy of code, the hunks that edit the copy, the likeliest first.
    """
    searching = _Search(list(needed), before, after, run, least, partners, halves, inside)
    return searching.found(order)


@dataclass
class _Search:
    needed: list[Taken]
    before: int
    after: int
    run: Callable[[Taken], int | None]
    least: int
    partners: Partners
    halves: Callable[[int], Taken]
    inside: Callable[[int], Sequence[int]]
    causes: list[Tried] = field(default_factory=list)
    values: dict[Taken, int | None] = field(default_factory=dict)
    joined: set[int] = field(default_factory=set)  # hunks with partners
    order: Sequence[int] = ()
    group: tuple[tuple[int, ...], int] | None = (
        None  # the group that is being split, and what it saves
    )

    def __post_init__(self) -> None:
        growth = self.after - self.before
        self.slack = max(self.least, int(growth * _EXPLAINED), 0)

    def found(self, order: Sequence[int]) -> Found:
        self.order = order
        taken, value = Taken(), self.after
        complete = True
        everything = Taken(order)
        try:
            taken, value = self._narrowed(tuple(order), taken, value, self.before)
            if value - self.before > self.slack and everything - taken:
                taken, value = self._search_together(order, taken, value)
            self._measure_alone()
        except OverBudget:
            complete = False
            if self.group is not None and not self.causes:
                self.causes.append(Tried(*self.group))
                taken, value = Taken(self.group[0]), self.after - self.group[1]
        taken = Taken(hunk for cause in self.causes for hunk in cause.hunks)
        left = self.values.get(taken) if taken else self.after
        together = self.after - (value if left is None else left)
        self.causes.sort(key=lambda cause: -cause.saved)
        floor = self.values.get(everything)
        rest = self.after - self.before - together
        return Found(tuple(self.causes), together, rest, floor, complete)

    def _value(self, taken: Taken) -> int | None:
        if not taken:
            return self.after
        if taken not in self.values:
            self.values[taken] = self.run(taken)
        return self.values[taken]

    def _with_needed(self, hunks: Iterable[int], taken: Taken) -> Taken:
        return taken.union(*(self.needed[hunk] for hunk in hunks))

    def _narrowed(
        self, hunks: tuple[int, ...], taken: Taken, value: int, floor: int
    ) -> tuple[Taken, int]:
        """Search causes among ``hunks``, with ``taken`` already reverted and the figure at
        ``value``. ``floor``: the (expected) figure with all of them reverted. Returns the reverted
        hunks and the figure, with the causes that it found reverted as well.
        """
        count = 1 if len(hunks) <= _FEW else 2
        while hunks and value - floor > self.slack and len(self.causes) < _MOST_CAUSES:
            head, hunks = hunks[:count], hunks[count:]
            if count > 1 or len(hunks) > _FEW:
                count *= 2  # the likely hunks are done
            trial = self._value(self._with_needed(head, taken))
            if trial is None and len(head) == 1:
                trial = self._with_partners(head[0], taken)
            if trial is None and len(head) > 1:
                hunks = (*head, *hunks)
                for hunk in head:  # some of them run
                    taken, value = self._narrowed((hunk,), taken, value, floor)
                    hunks = hunks[1:]
            elif trial is not None and value - trial > self.slack:
                if len(head) > 1:
                    if not taken:
                        self.group = head, value - trial
                    taken, value = self._narrowed(head, taken, value, trial)
                else:
                    taken, value = self._cause(head[0], taken, value, trial)
        return taken, value

    def _with_partners(self, hunk: int, taken: Taken) -> int | None:
        """The figure without a hunk and the hunks that need it; None if the program still fails."""
        unit = self.needed[hunk]
        for _ in range(_MOST_PARTNERS):
            more = self.partners(hunk, unit | taken) - unit - taken
            if not more:
                break
            unit = self._with_needed(more, unit)
            trial = self._value(unit | taken)
            if trial is not None:
                self.needed[hunk] = unit
                self.joined.add(hunk)
                return trial
        return None

    def _cause(self, hunk: int, taken: Taken, value: int, trial: int) -> tuple[Taken, int]:
        """Add the cause for ``hunk``, which saves something together with those that it needs; one
        of them may do so alone.
        """
        unit = self.needed[hunk] - taken
        smaller = sorted(
            (other for other in self.order if other in unit and self.needed[other] - taken < unit),
            key=lambda other: len(self.needed[other]),
        )
        unknown = 0
        for other in smaller:
            known = taken | self.needed[other]
            if hunk in self.joined and known not in self.values:
                unknown += 1
                if unknown > _MOST_PARTNERS:
                    continue  # most of these fail as the hunk itself did
            less = self._value(known)
            if less is not None and less - trial <= (value - trial) // 20:
                return self._cause(other, taken, value, less)
        unit, trial = self._whole(hunk, unit, taken, value, trial)
        cause = Tried((hunk, *sorted(unit - {hunk})), value - trial, alone=not taken)
        before, self.causes = self.causes, []
        try:
            within = self._edits(hunk, taken, value, trial)
        except OverBudget:
            self.causes = [*before, cause]
            raise
        if within is not None:
            self.causes = [*before, *self.causes]
            return within
        self.causes = [*before, cause]
        return taken | unit, trial

    def _edits(self, hunk: int, taken: Taken, value: int, trial: int) -> tuple[Taken, int] | None:
        """Search causes inside a copy that ``hunk`` adds or uses, if the copy costs nothing once it
        equals the original. None if there are none.
        """
        edits = tuple(self.inside(hunk))
        if not edits:
            return None
        self.order = (*self.order, *edits)
        least = trial + (value - trial) // 20
        less = self._value(self._with_needed(edits, taken))
        if less is None or less > least:
            return None
        found = self._narrowed(edits, taken, value, less)
        return found if self.causes and found[1] <= least else None

    def _whole(
        self, hunk: int, unit: Taken, taken: Taken, value: int, trial: int
    ) -> tuple[Taken, int]:
        """Extend a unit to the whole edit, if the unit alone saves more than the growth and the
        edit does not. Returns the unit and its figure.
        """
        growth = value - self.before
        if value - trial <= growth + self.slack:
            return unit, trial
        whole = self._with_needed(self.halves(hunk), unit) - taken
        back = self._value(whole | taken) if whole > unit else None
        if back is None or not self.slack < value - back <= growth + self.slack:
            return unit, trial
        return whole, back

    def _search_together(self, order: Sequence[int], taken: Taken, value: int) -> tuple[Taken, int]:
        """Search hunks that only save something together."""
        left = [hunk for hunk in order if hunk not in taken]
        floor = self._value(taken.union(left))
        if floor is None or value - floor <= self.slack:
            return taken, value
        enough = value - (value - floor) * 9 // 10
        if not taken:
            self.group = tuple(left), value - floor
        parts = 2
        while len(left) > 1:
            size = -(-len(left) // parts)
            # The least likely hunks are left out first.
            chunks = [left[at : at + size] for at in range(0, len(left), size)][::-1]
            for chunk in chunks:
                kept = [hunk for hunk in left if hunk not in chunk]
                trial = self._value(taken.union(kept)) if kept else None
                if trial is not None and trial <= enough:
                    left, floor = kept, trial
                    parts = max(2, parts - 1)
                    if not taken:
                        self.group = tuple(left), value - trial
                    break
            else:
                if size == 1:
                    break
                parts = min(len(left), parts * 2)
        assert floor is not None
        self.causes.append(Tried(tuple(left), value - floor, alone=not taken))
        return taken.union(left), floor

    def _measure_alone(self) -> None:
        """Measure what each of several causes saves without the others."""
        for at, cause in enumerate(self.causes):
            if not cause.alone:
                trial = self._value(
                    Taken(cause.hunks).union(*(self.needed[h] for h in cause.hunks))
                )
                if trial is not None and self.after - trial > 0:
                    hunks = cause.hunks
                    self.causes[at] = Tried(hunks, self.after - trial)


_KEEPS: Final = re.compile(
    r"\bno_grad\b|\binference_mode\b|\bset_grad_enabled\b|\.detach\w*\(|\.item\(\)|\.tolist\(\)"
    r"|\.cpu\(\)|^\s*del\b|\bautocast\b|checkpoint|\bset_to_none\b|\bzero_grad\b|\bempty_cache\b"
    r"|\bretain_graph\b|\bcreate_graph\b|\bretain_grad\b|\buse_reentrant\b|\brequires_grad\w*"
    r"|\bweakref\b|\bgc\.|\boffload\w*|\bclear\(\)|\bpop\w*\(|\bmaxlen\b|\bremove\(|\bfused\b"
    r"|\bforeach\b|\bstep\(\)|\bchunk\w*|\binplace\b|_\(|\bfloat16\b|\bbfloat16\b|\bhalf\(\)"
    r"|\bno_sync\b|\beval\(\)|\bgradient_\w+|\bremat\w*",
    re.MULTILINE,
)
"""Code that keeps memory low: its removal shows in lines that did not change."""

_KEPT: Final = re.compile(
    r"\bretain_graph\s*=\s*True|\bcreate_graph\s*=\s*True|\.append\(|\.clone\(|\.copy\(|deepcopy"
    r"|\.float\(\)|\bfloat(?:32|64)\b|\.double\(\)|cache|\bself\.\w+\s*=|\bglobal\b|\bcat\(|\bstack\("
    r"|\brepeat\w*\(|\.expand\(|\.contiguous\(|\bregister_\w+|\bretain_grad\b|\bcopy_\b|\bEMA\b|ema"
    r"|\bamsgrad\b|\bmomentum\b|\bAdam\w*|\bhook\b|\bstore|\bhistory\b|\bqueue\b|\bdeque\b",
    re.MULTILINE,
)
"""Code that keeps memory alive, or allocates more."""

_PRINTS: Final = re.compile(r"\bprint\(|\blogg?(?:er|ing)?\.|\bwarnings?\.|\bassert\b|\"\"\"|'''")
_NUMBER: Final = re.compile(r"(?<![\w.])\d[\d_]*(?:\.\d+)?(?:e[+-]?\d+)?")
_SIZES: Final = re.compile(
    r"batch|size|width|hidden|dim|layer|depth|length|seq|head|channel|token|vocab|accum|micro|worker"
    r"|buffer|prefetch|step|every|keep|window|crop|resol|image|block|expert|rank|beam|sample|num",
    re.IGNORECASE,
)
_FLAG: Final = re.compile(r"\b(?:true|false|yes|no|on|off|none|null)\b", re.IGNORECASE)
_IMPORT: Final = re.compile(r"^\s*(?:import|from)\b")


def likely_first(hunks: Sequence[Hunk], suspects: Sequence[Place]) -> list[int]:
    """The indices of the hunks, the likeliest first. ``suspects``: the lines that explain the
    growth by their place in the program, the best first.
    """
    scores = []
    for hunk in hunks:
        near = (2.5 / (1 + at) for at, line in enumerate(suspects) if _is_in(line, hunk))
        scores.append(meaning(hunk) + max(near, default=0.0))
    return sorted(range(len(hunks)), key=lambda at: (-scores[at], hunks[at].file, hunks[at].start))


def _is_in(line: Place, hunk: Hunk) -> bool:
    return line.file == hunk.file and hunk.start - (not hunk.new) <= line.line <= max(
        hunk.start, hunk.end - 1
    )


def meaning(hunk: Hunk) -> float:
    """The likelihood that a change of this kind needs memory, wherever it is: 0 to 4."""
    old, new = "".join(hunk.old), "".join(hunk.new)
    code = [text for text in (*hunk.old, *hunk.new) if text.strip()]
    if not code or all(_IMPORT.match(text) for text in code):
        return 0.0
    if hunk.whole is not None:
        return 1.0
    score = 0.5
    lost = _has_more(_KEEPS, old, new)
    if lost:
        score = 3.0
    elif _has_more(_KEPT, new, old):
        score = 2.0
    if not hunk.file.endswith(".py") or old.lstrip().startswith("@"):
        score = max(score, 1.5)
    if old and new:
        score = max(score, _value_score(old, new))
    if all(_PRINTS.search(text) for text in code) and not lost:
        score -= 1.0
    return max(0.0, score)


def _has_more(pattern: re.Pattern[str], one: str, two: str) -> bool:
    """Whether ``one`` has more matches of ``pattern`` than ``two``."""
    return len(pattern.findall(one)) > len(pattern.findall(two))


def _value_score(old: str, new: str) -> float:
    """The score of a line in which only values changed: numbers that rose, flags that flipped."""
    one, two = _NUMBER.findall(old), _NUMBER.findall(new)
    of_size = 1.0 if _SIZES.search(new) else 0.0
    same = _NUMBER.sub("0", old).split() == _NUMBER.sub("0", new).split()
    if same and one != two:
        rose = any(float(b.replace("_", "")) > float(a.replace("_", "")) for a, b in
                   zip(one, two, strict=True))  # fmt: skip
        return (1.5 if rose else 0.8) + of_size
    if _FLAG.sub("?", old).split() == _FLAG.sub("?", new).split():
        return 2.0
    return 1.0
