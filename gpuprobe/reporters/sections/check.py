"""A check against a baseline: the verdict, the causes, and the changes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final

from gpuprobe.analysis.baseline.check import ANOTHER_MODEL, ENVIRONMENT, INCOMPLETE
from gpuprobe.analysis.baseline.model import CheckResult, MetricResult
from gpuprobe.analysis.compare.diff import DiffRow, rows_by_need
from gpuprobe.analysis.repeats import change_groups
from gpuprobe.model.findings import Level
from gpuprobe.model.text import amount, amount_delta, plural
from gpuprobe.reporters.sections.diff import most_of
from gpuprobe.reporters.sections.parts import (
    Cell,
    Code,
    Column,
    Line,
    Part,
    Row,
    Section,
    Table,
    change,
    count,
    duration,
    named,
    size,
)

_ROWS = 8


def check_sections(result: CheckResult, top: int = _ROWS, *, full: bool = True) -> list[Section]:
    """The check. ``top``: rows of each table of changes; the other rows are summed. Without
    ``full``, what fits on a screen: the verdict, causes, what grew and what to do; and what
    ``--verbose`` adds.
    """
    if not full:
        return _short(result)
    found = [_answer(result, _causes(result))]
    if result.metrics:
        table = _metrics(result.metrics, "against the baseline")
        found.append(Section(parts=(table,), name="metrics", short="Metrics"))
    moved = _moved(result)
    if moved:
        title = "Peak of each phase and kind of step"
        table = replace(_metrics(moved, "phases"), header=False)
        found.append(Section(title, (table,), "phases", "Phases"))
    found += _changes(result, top)
    notes = [Line(text, "item", "note", indent=0) for text in result.cautions]
    if result.trials and result.regressions:
        notes.append(Line(result.trials, "item", "causes", indent=0))
    notes += [Line(text, "item", indent=0) for text in _settings(result)]
    if notes:
        found.append(Section("", tuple(notes), "settings", "Notes"))
    return [*found, *_what_to_do(result)]


def _answer(result: CheckResult, causes: Sequence[Line]) -> Section:
    """The verdict, the causes, and why nothing was compared."""
    parts: list[Part] = [*causes]
    parts += [Line(text, "alert") for text in (*result.incomplete, *result.mismatches)]
    if result.incomplete:
        parts.append(Line(" ".join(INCOMPLETE.remedy.split()), "item", "what to do"))
    if any(not text.startswith(ANOTHER_MODEL) for text in result.mismatches):
        parts.append(Line(" ".join(ENVIRONMENT.remedy.split()), "item", "what to do"))
    level = None if result.ok else Level.ERROR
    return Section(verdict(result), tuple(parts), "answer", level=level)


def _causes(result: CheckResult) -> list[Line]:
    """The first cause of what grew, and the others, a line each."""
    if not result.cause or not result.regressions:
        return []
    return [
        Line(_first_cause(result), "item", "first cause", code=True),
        *(Line(text, "item", "next", code=True) for text in _next_causes(result)),
        *(Line(text, "item", "also", code=True) for text in _other_causes(result)),
    ]


_FEW: Final = 3
"""Causes of a short check, and rows of its tables."""


def _short(result: CheckResult) -> list[Section]:
    """The check on one screen: what is above its limit, or else the peak; and what -v adds."""
    causes = _causes(result)
    answer = _answer(result, causes[:_FEW])
    notes = [Line(text, label="note") for text in result.cautions]
    shown = (*(item for item in result.metrics if item.regressed), *result.regressions)
    above = list(dict.fromkeys(shown))[:_FEW]
    if not above:
        peak = [Line(_peak(item, result)) for item in result.metrics if item.name == _PEAK]
        notes = [*peak, *notes]
    sections = [replace(answer, parts=(*answer.parts, *notes))]
    if above:
        sections.append(Section(parts=(_metrics(above, "above the baseline"),), name="metrics"))
    changes = [*_changes(result, _FEW)]
    lines = [one for one in changes if one.name in ("by-blamed", "by-line")][:1]
    sections += [*lines, *_what_to_do(result, 1)]
    tables = [one.name.removeprefix("by-") for one in changes if one not in lines]
    left = len(result.metrics) + len(_moved(result)) - max(len(above), 1)
    more = [
        *([plural(left, "more metric")] if left > 0 else []),
        *([plural(len(causes) - _FEW, "more cause")] if len(causes) > _FEW else []),
        *([f"changes by {', '.join(tables)}"] if tables else []),
        *(["settings"] if result.settings else []),
    ]
    if more:
        sections.append(Section(parts=(Line(f"more with -v: {', '.join(more)}", indent=0),)))
    return sections


_PEAK: Final = "peak_allocated"


def _peak(item: MetricResult, result: CheckResult) -> str:
    """The peak, that of the baseline, and the baseline's file."""
    file = next((one.value for one in result.settings if one.name == "baseline"), "")
    after, before, limit = (
        amount(number, item.unit) for number in (item.after, item.before, item.limit)
    )
    where = f" ({file})" if file else ""
    return f"peak allocated: {after}; baseline: {before}{where}; limit: {limit}"


def _moved(result: CheckResult) -> list[MetricResult]:
    """The phases and kinds of step whose peak is another one."""
    return [metric for metric in result.phases if metric.delta or metric.regressed]


def _what_to_do(result: CheckResult, limits: int = 4) -> list[Section]:
    """For a check that failed: what was accepted, of so many metrics, and the commands to reproduce
    and to accept the growth.
    """
    parts: list[Part] = []
    for metric in result.regressions[:limits]:
        after, limit, before = (
            amount(number, metric.unit) for number in (metric.after, metric.limit, metric.before)
        )
        parts.append(
            Line(
                f"{metric.name} is {after}, the limit is {limit} "
                f"(baseline {before}; tolerance: {metric.accepted}, "
                f"{metric.source})",
                "item",
                "tolerance",
            )
        )
    rest = len(result.regressions) - limits
    if rest > 0:
        parts.append(Line(f"({rest} more)", indent=4))
    for text, command in (
        ("The same comparison again:", result.reproduce),
        ("If this growth is intended, make it the baseline:", result.accept),
    ):
        if command:
            parts += [Line(text, "item"), Code(f"$ {command}")]
    return [Section("What to do", tuple(parts), "what-to-do", "What to do")] if parts else []


def run_sections(
    *results: CheckResult, top: int = _ROWS, summary: bool = False, full: bool = True
) -> list[Section]:
    """The check of all runs: several are each under their name, after the verdict on all.
    ``summary``: for readers of a CI job, with the tables that they act on; ``full`` as in
    `check_sections`.
    """
    if summary:
        return _job_summary(results)
    each = [check_sections(result, top, full=full) for result in results]
    return each[0] if len(each) == 1 else _by_run(results, each)


def _by_run(results: Sequence[CheckResult], each: Sequence[Sequence[Section]]) -> list[Section]:
    failed = [result for result in results if not result.ok]
    title = (
        f"{len(failed)} of {plural(len(results), 'run')} above the baseline, or not comparable"
        if failed
        else f"memory is within the baseline in {plural(len(results), 'run')}"
    )
    found = [Section(title, (), "answer", level=Level.ERROR if failed else None)]
    for result, (head, *rest) in zip(results, each, strict=True):
        inner = (replace(part, name=f"{result.run}-{part.name}") for part in rest)
        found.append(
            replace(
                head,
                title=f"{result.run}: {head.title}",
                parts=(*head.parts, *inner),
                name=f"run-{result.run}",
                short=result.run,
            )
        )
    return found


def _job_summary(results: Sequence[CheckResult]) -> list[Section]:
    each = []
    for result in results:
        head, *rest = check_sections(result)
        shown = [section for section in rest if section.name not in ("by-category", "by-module")]
        each.append([head, *shown])
    head, *rest = each[0] if len(results) == 1 else _by_run(results, each)
    ok = all(result.ok for result in results)
    return [replace(head, title=f"{'✅' if ok else '❌'} gpuprobe: {head.title}"), *rest]


def verdict(result: CheckResult) -> str:
    """The outcome in one line."""
    if result.incomplete:
        return "not checked: the recording is incomplete"
    if result.mismatches:
        return "the baseline is from another environment"
    if not result.regressions:
        timed = any(item.name == "step_time" for item in result.metrics)
        return "memory is within the baseline" + (", the time of a step too" if timed else "")
    return f"{plural(len(result.regressions), 'metric')} above the baseline"


def _metrics(metrics: Sequence[MetricResult], caption: str) -> Table:
    def row(metric: MetricResult) -> Row:
        cell = _CELLS[metric.unit]
        return Row(
            (
                Cell(metric.name, tone="strong" if metric.regressed else ""),
                cell(metric.before),
                cell(metric.after),
                change(metric.delta, metric.unit),
                cell(metric.limit),
                Cell("above", tone="up") if metric.regressed else _passed(metric),
                f"{metric.accepted} ({metric.source})",
            ),
            metric.regressed,
        )

    columns = (
        Column("metric", 28),
        Column("baseline", 12, number=True),
        Column("now", 12, number=True),
        Column("change", 12, number=True),
        Column("limit", number=True, hint="baseline and tolerance"),
        Column(""),
        Column("accepted"),
    )
    return Table(caption, columns, tuple(map(row, metrics)), flags=True)


_CELLS = {"bytes": size, "count": count, "ns": duration}


def _passed(metric: MetricResult) -> str:
    return "ignored" if metric.ignored and metric.delta > 0 else "ok"


def _changes(result: CheckResult, top: int) -> Iterator[Section]:
    """Tables of changes: of the first regression by line, then of the peak by line, category and
    module. Each sums to the change of the metric in its title."""
    peak = result.rows or {}
    first = next((item for item in result.regressions if item.rows), None)
    blamed = None if first is None or first.name == "peak_allocated" else first.rows
    if first is not None and blamed is not None and blamed != peak.get("line"):
        what = _ACCOUNTS.get(first.name, f"at the peak of {first.name}")
        title = f"What changed {what}, by lines"
        yield from _change_table("by-blamed", title, "line", blamed, first.unit, top)
    yield from _need_table(peak.get("need", ()))
    for by, plurals in (("line", "lines"), ("category", "categories"), ("module", "modules")):
        title = f"What changed at the peak, by {plurals}"
        yield from _change_table(f"by-{by}", title, by, peak.get(by, ()), "bytes", top)


def _need_table(rows: Sequence[DiffRow]) -> Iterator[Section]:
    """What changed at the peak by need, each with the line of which most of it is."""
    needs = {need: some for need, some in rows_by_need(rows).items() if any(r.delta for r in some)}
    if not needs:
        return
    lines = [
        Row((change(sum(row.delta for row in some)), need.label), note=most_of(some))
        for need, some in needs.items()
    ]
    total = Row((change(sum(row.delta for row in rows)), "total"))
    table = Table(
        "changes by need",
        (Column("change", 12, number=True), Column("need", 0, gap=2, cut=False)),
        tuple(lines),
        (total,),
        header=False,
        note_indent=16,
    )
    title = "What changed at the peak, by what it is needed for"
    yield Section(title, (table,), "by-need", "By need")


_ACCOUNTS = {
    "growth_per_step": "in what the steps left behind",
    "steady_allocated": "in what is left after the last step",
    "peak_reserved": "in the segments taken from the driver",
    "device_allocs_after_warm_up": "in the calls of cudaMalloc",
    "implicit_syncs_per_step": "in the implicit synchronisations of the run",
    "races": "in the races",
    "step_time": "in the predicted time of a step on the GPU",
}


def _change_table(
    name: str, title: str, by: str, rows: Sequence[DiffRow], unit: str, top: int
) -> Iterator[Section]:
    changed = [row for row in rows if row.delta]
    if not changed:
        return
    groups = change_groups(changed, by)
    rest = [row for group in groups[top:] for row in group.members]

    def shown(name: str, members: Sequence[DiffRow]) -> Row:
        inside = tuple(shown(row.key, (row,)) for row in members) if len(members) > 1 else ()
        total = change(sum(row.delta for row in members), unit)
        return Row((total, Cell(named(name), place=True, times=len(members))), members=inside)

    foot = []
    if rest:
        foot.append(Row((change(sum(r.delta for r in rest), unit), f"({len(rest)} more)")))
    foot.append(Row((change(sum(row.delta for row in changed), unit), "total")))
    table = Table(
        f"changes by {by}",
        (Column("change", 12, number=True), Column(by, 0, gap=2, cut=False)),
        tuple(shown(group.name, group.members) for group in groups[:top]),
        tuple(foot),
        header=False,
    )
    yield Section(title, (table,), name, f"By {by}")


def _first_cause(result: CheckResult) -> str:
    """The cause; with how much longer a step takes, if it explains that."""
    time = _longer_step(result)
    longer = time is not None and time.cause == result.cause
    return f"{_percent(time)} a step: {result.cause}" if time and longer else result.cause


def _longer_step(result: CheckResult) -> MetricResult | None:
    return next((item for item in result.regressions if item.name == "step_time"), None)


def _percent(time: MetricResult) -> str:
    """``+18%``."""
    return f"{time.delta / time.before:+.0%}" if time.before else amount_delta(time.delta, "ns")


def _next_causes(result: CheckResult) -> list[str]:
    """The other candidates for the first cause."""
    first = next((item for item in result.regressions if item.cause == result.cause), None)
    return [] if first is None else [cause.text for cause in first.causes[1:]]


def _other_causes(result: CheckResult) -> list[str]:
    """The other regressions with their own causes, and how much longer a step takes for the first
    one.
    """
    same = [item for item in result.regressions if item.cause == result.cause]
    known = {"", *(cause.place for item in same for cause in item.causes)}
    known |= {item.place for item in same}
    found = []
    for item in result.regressions:
        if item.place not in known:
            known.add(item.place)
            name = f"{_percent(item)} a step" if item.name == "step_time" else item.name
            found.append(f"{name}: {item.cause}")
        elif item.name == "step_time" and item.cause != result.cause and item.causes:
            found.append(f"{_percent(item)} a step: {item.causes[0].text}")
    return found


def _settings(result: CheckResult) -> list[str]:
    """Settings of the measurement and the comparison with their sources; empty if all are
    defaults."""
    lines = []
    if result.settings:
        parts = [f"{item.name} {item.value} ({item.source})" for item in result.settings]
        lines.append(f"measured: {'; '.join(parts)}")
    chosen = [metric for metric in result.metrics if metric.source != "default"]
    if chosen:
        parts = [f"{metric.name} {metric.accepted} ({metric.source})" for metric in chosen]
        rest = "; others: defaults" if len(chosen) < len(result.metrics) else ""
        lines.append(f"accepted above the baseline: {'; '.join(parts)}{rest}")
    return lines
