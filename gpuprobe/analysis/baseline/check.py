"""Compares a run with its baseline; the rules of ``gpuprobe check``: one for each metric, for the
environment and for the recording.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from gpuprobe.analysis.baseline.model import (
    ACCOUNT_OF,
    BELOW_PEAK,
    IGNORED,
    METRICS,
    MORE_BELOW_PEAK,
    ONCE,
    PEAK,
    Baseline,
    CheckResult,
    MetricResult,
    Tolerance,
    important_first,
    is_exact,
)
from gpuprobe.analysis.blame.blame import Blame, SourceGraph
from gpuprobe.analysis.blame.source import changes
from gpuprobe.analysis.compare.accounts import Account, most_bytes
from gpuprobe.analysis.compare.causes import Cause, Context, changed_lines, explain
from gpuprobe.analysis.compare.diff import DiffRow, join_needs, join_rows
from gpuprobe.analysis.compare.matching import LineInfo, match_lines, match_modules
from gpuprobe.analysis.peak.peaks import Share
from gpuprobe.model.findings import Level
from gpuprobe.model.needs import Need
from gpuprobe.model.place import Place, parse_place
from gpuprobe.model.rules import Rule, define
from gpuprobe.model.text import amount, human_bytes
from gpuprobe.user_frames import is_outside

INTENDED = "if this is intended, run gpuprobe baseline update"
_KIND = "memory-regression"
_KINDS = {"step_time": "time-regression"}

ENVIRONMENT = define(
    "GPM-environment",
    "baseline-environment",
    Level.ERROR,
    "The baseline is from the same environment",
    description="A different GPU, torch or allocator setting changes the figures: a comparison\n"
    "would not be meaningful.",
    remedy="run the check in the baseline's environment, or run gpuprobe baseline update if\n"
    "this is the new one; --accept-environment compares anyway",
)
INCOMPLETE = define(
    "GPM-incomplete",
    "incomplete-recording",
    Level.ERROR,
    "The recording is complete",
    description="Steps that are missing may have needed more memory than all others: a comparison\n"
    "of the rest shows nothing.",
    remedy="record the run again, on a disk with free space, and to its end",
)
_WHY = {
    "growth_per_step": "Memory that a step allocates is never freed: the longer the run, the more\n"
    "it needs, until it runs out of memory.",
    "peak_allocated": "The highest memory of all tensors: above the GPU's memory, the run\nfails.",
    "steady_allocated": "What is allocated after the last step: parameters, optimizer state, and\n"
    "everything that is still referenced.",
    "peak_reserved": "The highest memory obtained from the driver, which other processes cannot\n"
    "use. It also grows with fragmentation.",
    "device_allocs_after_warm_up": "Each call of cudaMalloc waits for the device. Once steps\n"
    "repeat, the allocator's cache should serve them.",
    "implicit_syncs_per_step": "Each implicit synchronisation makes the host wait for the device,\n"
    "which is then idle.",
    "races": "Two streams use one tensor without synchronisation: the results are random.",
    "step_time": "The predicted time of a training step: its work on this GPU, played in time.\n"
    "The same program gives the same figure, on every machine.",
}
_METRICS = {
    name: define(
        f"GPM-{name}",
        _KINDS.get(name, _KIND),
        Level.ERROR,
        f"{name} is not above the baseline",
        description=_WHY[name],
        remedy=INTENDED,
    )
    for name in METRICS
}
_PHASE = define(
    "GPM-*",
    _KIND,
    Level.ERROR,
    "The peak of a phase, or of a kind of step, is not above the baseline",
    remedy=INTENDED,
)


def regression(name: str) -> tuple[str, Rule]:
    """The id under which a metric (or phase) is reported, and its rule."""
    return f"GPM-{name.replace(' ', '-')}", _METRICS.get(name, _PHASE)


_REFUSED = ("device", "torch", "allocator")
"""Keys of the environment that must be equal: each changes sizes, whatever the program does."""

ANOTHER_MODEL = "model: "
"""The prefix of a mismatch that no option accepts."""

_MOST_CAUSES = 3
"""Causes reported for one metric."""

_NOUNS = {
    "device_allocs_after_warm_up": "call{s} of cudaMalloc",
    "implicit_syncs_per_step": "implicit synchronisation{s} in the run",
    "races": "race{s}",
}


def check_baseline(
    before: Baseline,
    after: Baseline,
    tolerances: Mapping[str, Tolerance] | None = None,
    sources: Mapping[str, str] | None = None,
    *,
    accept_environment: bool = False,
) -> CheckResult:
    """Compare a run with its baseline. Tolerances are the call's, else the baseline's, else those
    of `METRICS`. ``sources``: where the call's tolerances were set.
    ``accept_environment``: a different environment is a caution instead of a mismatch.
    """
    chosen = {name: tolerance for name, (_, tolerance) in METRICS.items()}
    if all(is_exact(side.environment.get("device", "")) for side in (before, after)):
        chosen |= IGNORED
    given_by = dict.fromkeys(METRICS, "default")
    for given, source in ((before.tolerances or {}, "baseline"), (tolerances or {}, "call")):
        chosen.update(given)
        given_by.update(dict.fromkeys(given, source))
    given_by.update(sources or {})
    lines = _matched_lines(before, after)
    context = _context(before, after)
    blame = _blame(before, after)

    def result(name: str, unit: str, one: int, two: int, rule: str, account: str) -> MetricResult:
        tolerance = chosen[rule]
        # A phase may grow by a share of the whole program's peak, not of its peak.
        more = tolerance.limit(before.metrics.get(rule, one)) - before.metrics.get(rule, one)
        found = MetricResult(name, unit, one, two, one + more, tolerance.text(unit), given_by[rule])
        if tolerance is IGNORED.get(rule):
            text = f"up to {human_bytes(more)} ignored"
            found = replace(found, accepted=text, ignored=True)
        peak = before.metrics.get("peak_allocated", 0)
        if name in before.phases and given_by[rule] == "default" and two < peak * BELOW_PEAK:
            once = name in ONCE or _is_at_the_end(name, after)
            more = max(more, int(peak * BELOW_PEAK) - one if once else int(one * MORE_BELOW_PEAK))
            text = f"up to {human_bytes(more)} ignored: below the peak"
            found = replace(found, limit=one + more, accepted=text, ignored=True)
        if found.regressed and account in before.accounts and account in after.accounts:
            old, new = before.accounts[account], after.accounts[account]
            rows = join_rows(_shares(old), _shares(new), lines)
            here = replace(context, evaluation=name == "phase evaluation")
            causes: tuple[Cause, ...] = ()
            if blame is not None and new.unit != "count":
                causes = changed_lines(rows, old, new, here, blame)
            cause = explain(rows, old, new, here, _NOUNS.get(name, ""))
            if cause is not None and cause.place not in {item.place for item in causes}:
                causes = (*causes, cause)
            if causes:
                found = replace(found, cause=causes[0].text, place=causes[0].place)
            found = replace(found, causes=causes[:_MOST_CAUSES], rows=rows)
        return found

    metrics = []
    for name in _compared(before, after):
        one, two = before.metrics[name], after.metrics[name]
        metrics.append(result(name, METRICS[name][0], one, two, name, ACCOUNT_OF[name]))
    phases = [
        result(name, "bytes", size, after.phases[name], "peak_allocated", name)
        for name, size in sorted(before.phases.items(), key=lambda item: _order(item[0]))
        if name in after.phases
    ]
    rows = _rows(before, after, lines)
    regressed = important_first(metrics, phases)
    environment = tuple(_mismatches(before, after))
    return CheckResult(
        metrics=tuple(metrics),
        phases=tuple(phases),
        rows=rows,
        cause=next((item.cause for item in regressed if item.cause), ""),
        mismatches=(*(() if accept_environment else environment), *_another_model(rows)),
        cautions=(
            *(f"{text}; compared anyway" for text in environment if accept_environment),
            *_of_ranks(after),
            *_cautions(before, after, rows is not None),
            *_regression_cautions(before, after, regressed),
            *(() if environment else _fall_cautions(before, metrics, chosen)),
        ),
    )


def _of_ranks(measured: Baseline) -> Iterator[str]:
    rank, count = measured.rank
    if count > 1:
        yield f"of {count} ranks, the one with the highest peak is compared: rank {rank}"


def not_compared(missing: tuple[str, ...]) -> CheckResult:
    """The result for a recording in which this is missing."""
    return CheckResult((), (), None, "", incomplete=missing)


def _compared(before: Baseline, after: Baseline) -> list[str]:
    """The metrics that both sides have, as far as they are comparable."""
    names = [name for name in METRICS if name in before.metrics and name in after.metrics]
    if _have_other_prices(before, after):
        names = [name for name in names if name != "step_time"]
    return names


def _have_other_prices(before: Baseline, after: Baseline) -> bool:
    """Whether the times of steps were predicted in different ways, by two versions of gpuprobe."""
    return "step_time" in before.metrics and before.environment.get(
        "prices"
    ) != after.environment.get("prices")


def _is_at_the_end(name: str, side: Baseline) -> bool:
    """Whether this is the evaluation phase, with its peak after the last step."""
    end = side.phases.get("after the last step")
    return name == "phase evaluation" and side.phases[name] == end


def _blame(before: Baseline, after: Baseline) -> Blame | None:
    """The changes of the source between two runs; None if either has no source."""
    now = {name: source for name, source in after.sources.items() if source.text is not None}
    if not before.sources or not now:
        return None
    compared = {name: source for name, source in now.items() if _is_comparable(name, before, after)}
    found = changes(before.sources, compared)
    return Blame(SourceGraph(now), found) if found else None


def _is_comparable(name: str, before: Baseline, after: Baseline) -> bool:
    """Whether a file can be compared. Without a source in the baseline, it has to be new. Of
    installed packages a baseline only has the files that allocated memory: others may be unchanged.
    """
    if name in before.sources:
        return True
    if is_outside(name):
        return False
    kept, now = before.files.get(name), after.files.get(name)
    return kept is None or now is None or kept.digest != now.digest


def _order(name: str) -> tuple[bool, str]:
    """Sorts phases before kinds of step: the cause of a phase is more specific."""
    return not name.startswith("phase "), name


def _mismatches(before: Baseline, after: Baseline) -> Iterable[str]:
    for key in _REFUSED:
        one, two = before.environment.get(key, ""), after.environment.get(key, "")
        if one != two and not (key == "device" and _is_unnamed_gpu(one, two)):
            yield f"{key}: {one!r} in the baseline, {two!r} now"


def _is_unnamed_gpu(one: str, two: str) -> bool:
    """Whether both are GPUs, one of them without a name (recordings do not contain it)."""
    return "cuda" in (one, two) and "cpu" not in (one, two)


def _another_model(rows: Mapping[str, Sequence[DiffRow]] | None) -> Iterable[str]:
    """A mismatch if the memory at the two peaks is unrelated: then a smaller size means nothing
    either. Two programs have no line in common. One program with two models has no module in
    common, nor the name of one; three different names are too many for a renaming, as are three
    lines of one file.
    """
    if rows is None:
        return
    lines, modules = (_Unmatched(rows[by]) for by in ("line", "module"))
    ours, theirs = modules.names()
    apart = min(len(ours), len(theirs)) >= 3 and not ours & theirs
    one_file = lines.files(lines.gone) & lines.files(lines.new)
    few = one_file and min(len(lines.gone), len(lines.new)) < 3
    if (lines.alone and not few and not modules.common) or (modules.alone and apart):
        one, two = (modules if modules.alone else lines).largest()
        yield f"{ANOTHER_MODEL}{one!r} in the baseline, {two!r} now, with nothing in common"


class _Unmatched:
    """The named rows of a comparison: removed ones, added ones, and whether any is ``common``."""

    def __init__(self, rows: Iterable[DiffRow]) -> None:
        named = [row for row in rows if not row.key.startswith("(")]
        self.gone = [row for row in named if row.status == "removed"]
        self.new = [row for row in named if row.status == "added"]
        self.common = len(self.gone) + len(self.new) < len(named)
        self.alone = bool(self.gone and self.new) and not self.common

    def largest(self) -> tuple[str, str]:
        """The model's class or the file with the most bytes, before and after."""
        one, two = Counter[str](), Counter[str]()
        for row in (*self.gone, *self.new):
            side = one if row.status == "removed" else two
            side[re.split(r"[.](?!py\b)|:", row.key)[0]] += row.before + row.after
        return most_bytes(one), most_bytes(two)

    def files(self, rows: Iterable[DiffRow]) -> set[str]:
        """The files of some rows."""
        return {row.key.rpartition(":")[0] for row in rows}

    def names(self) -> tuple[set[str], set[str]]:
        """The names of submodules before and after, without the numbers of list items."""
        one, two = (
            {name for row in side for name in row.key.split(".")[1:] if not name.isdigit()}
            for side in (self.gone, self.new)
        )
        return one, two


def _cautions(before: Baseline, after: Baseline, traced: bool) -> Iterable[str]:
    for name in METRICS:
        if name in before.metrics and name not in after.metrics:
            yield f"{name} is in the baseline but was not measured in this run"
    if "step_time" in after.metrics and _have_other_prices(before, after):
        yield (
            "step_time was not compared: the baseline's is by the prices of another version of "
            "gpuprobe, or by other measured kernels; gpuprobe baseline update renews it"
        )
    gone = [name for name in before.phases if name not in after.phases]
    if gone and after.phases:
        yield f"skipped, because they did not occur in this run: {', '.join(gone)}"
    elif gone or (after.phases and not before.phases):
        yield ("phases were not compared: some steps have no trace (record with --trace-steps all)")
    devices = [side.environment.get("device", "") for side in (before, after)]
    if _is_unnamed_gpu(*devices) and devices[0] != devices[1]:
        known = next(name for name in devices if name != "cuda")
        side = "the baseline" if devices[0] == "cuda" else "the recording"
        yield f"device: {side} has no GPU name; compared with {known!r}"
    one, two = (side.environment.get("precision", "") for side in (before, after))
    if one != two:
        yield (
            f"precision: {one or 'unknown'} in the baseline, {two or 'unknown'} now; "
            "compared anyway"
        )
    if before.steps != after.steps:
        yield f"{before.steps} steps in the baseline, {after.steps} now"
    if not traced:
        yield "one side has no trace, so the cause is unknown (use level trace)"


_STEPS_FOR_GROWTH = 8
"""Steps, including the two of the warm-up, after which growth in each third step shows twice."""


def _regression_cautions(
    before: Baseline, after: Baseline, regressed: Sequence[MetricResult]
) -> Iterable[str]:
    names = {item.name for item in regressed}
    grows = {"steady_allocated"} <= names and "growth_per_step" not in names
    if grows and after.steps < _STEPS_FOR_GROWTH:
        yield f"{after.steps} steps are not enough to detect growth: {_STEPS_FOR_GROWTH} are needed"


def _fall_cautions(
    before: Baseline, metrics: Sequence[MetricResult], chosen: Mapping[str, Tolerance]
) -> Iterable[str]:
    """A caution if memory fell by more than the tolerance: an update locks it in."""
    fell = [
        f"{item.name} {human_bytes(item.before)} → {human_bytes(item.after)}"
        for item in metrics
        if item.unit == "bytes" and item.before > chosen[item.name].limit(item.after)
    ]
    if fell and not any(item.regressed for item in metrics):
        yield f"memory fell ({', '.join(fell)}): gpuprobe baseline update locks this in"


def _context(before: Baseline, after: Baseline) -> Context:
    one, two = (side.environment.get("precision", "") for side in (before, after))
    starts: Counter[str] = Counter()
    models: Counter[str] = Counter()
    for name, account in after.accounts.items():
        for line in account.lines:
            if account.unit == "bytes" and line.calls.endswith("backward"):
                starts[line.key] = max(starts[line.key], line.bytes)
            if name == "phase forward":
                for path, size in line.paths:
                    if len(path) > 1:
                        models[path[-1]] += size
    freed = frozenset(
        line.key
        for account in before.accounts.values()
        for line in account.lines
        if line.until == "backward"
    )
    return Context(
        (one, two) if one and two and one != two else None,
        most_bytes(models),
        most_bytes(starts),
        freed,
        growing=_growing(before, after),
    )


def _growing(before: Baseline, after: Baseline) -> frozenset[str]:
    """The lines that now leave more memory behind over the steps than before."""
    name = ACCOUNT_OF["growth_per_step"]
    if after.metrics.get("growth_per_step", 0) <= before.metrics.get("growth_per_step", 0):
        return frozenset()
    was = {line.key: line.bytes for line in before.accounts.get(name, Account(0)).lines}
    return frozenset(
        line.key
        for line in after.accounts.get(name, Account(0)).lines
        if line.bytes > max(0, was.get(line.key, 0))
    )


# -- pairing lines and modules


def _matched_lines(before: Baseline, after: Baseline) -> dict[str, str]:
    """Map keys of lines before to keys after; one pairing for all accounts."""
    pairs = match_lines(_infos(before), _infos(after))
    for account in before.accounts.values():
        for line in account.lines:
            if line.key.startswith("("):
                pairs[line.key] = line.key
    # Lines of counts (synchronisations) have no stack to compare: equal keys are paired.
    taken = set(pairs.values())
    there = {line.key for account in after.accounts.values() for line in account.lines}
    for account in before.accounts.values():
        for line in account.lines:
            if line.key not in pairs and line.key in there - taken:
                pairs[line.key] = line.key
    return pairs


def _infos(side: Baseline) -> list[LineInfo]:
    found: dict[str, LineInfo] = {}
    for name, account in side.accounts.items():
        # An amount identifies a line only if the line itself allocated it.
        is_size = account.unit == "bytes" and name not in ("growth", "reserved")
        for line in account.lines:
            place = parse_place(line.key)
            if not isinstance(place, Place) or not place.file:
                continue
            known = found.get(line.key)
            size = max(line.bytes if is_size else 0, known.bytes if known is not None else 0)
            calls = tuple(line.calls.split())
            found[line.key] = LineInfo(
                line.key, place.file, place.line, place.function, calls, size
            )
    return list(found.values())


def _shares(account: Account) -> list[Share[str]]:
    return [Share(line.key, line.bytes, line.blocks) for line in account.lines]


def _rows(
    before: Baseline, after: Baseline, lines: dict[str, str]
) -> dict[str, tuple[DiffRow, ...]] | None:
    if PEAK not in before.accounts or PEAK not in after.accounts:
        return None
    one, two = before.accounts[PEAK], after.accounts[PEAK]
    named = [
        {share.key: share.bytes for share in side.modules if not share.key.startswith("(")}
        for side in (one, two)
    ]
    same = {share.key: share.key for share in one.modules if share.key.startswith("(")}
    return {
        "category": join_rows(
            one.categories, two.categories, {share.key: share.key for share in one.categories}
        ),
        "module": join_rows(one.modules, two.modules, same | match_modules(*named)),
        "line": join_rows(_shares(one), _shares(two), lines),
        "need": join_needs(_by_need(one), _by_need(two), lines)
        if all(any(line.needs for line in side.lines) for side in (one, two))
        else (),
    }


def _by_need(account: Account) -> dict[Need, list[Share[str]]]:
    """The lines of each need; what is not in the trace has none."""
    found: dict[Need, list[Share[str]]] = {}
    for line in account.lines:
        for name, size in line.needs or ((Need.UNTRACED.value, line.bytes),):
            found.setdefault(Need(name), []).append(Share(line.key, size, 0))
    return found


class MeasuredRun(Protocol):
    """The figures of another run of the program: a baseline, or the result of a trial."""

    @property
    def metrics(self) -> Mapping[str, int]:
        """Values by name."""

    @property
    def phases(self) -> Mapping[str, int]:
        """Peaks of phases and kinds of step, by name."""


def with_repeats(result: CheckResult, others: Sequence[MeasuredRun]) -> CheckResult:
    """The check with more runs of the same program: a metric has regressed only if it is above its
    limit in all runs. If runs differ, there is a caution.
    """
    texts: list[str] = []

    def checked(metric: MetricResult, values: list[int]) -> MetricResult:
        every = sorted({metric.after, *values})
        if len(every) > 1:
            amounts = [amount(n, metric.unit) for n in every]
            texts.append(f"{metric.name} {', '.join(amounts)}")
        if not metric.regressed or every[0] > metric.limit:
            return metric
        return replace(metric, after=every[0], cause="", place="", causes=(), rows=None)

    metrics = tuple(
        checked(item, [run.metrics[item.name] for run in others if item.name in run.metrics])
        for item in result.metrics
    )
    phases = tuple(
        checked(item, [run.phases[item.name] for run in others if item.name in run.phases])
        for item in result.phases
    )
    if not texts:
        return result
    text = f"not deterministic: {len(others) + 1} runs needed different memory ({'; '.join(texts)})"
    found = replace(result, metrics=metrics, phases=phases, cautions=(text, *result.cautions))
    cause = next((item.cause for item in found.regressions if item.cause), "")
    return replace(found, cause=cause)
