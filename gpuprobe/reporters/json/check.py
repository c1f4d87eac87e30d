"""A check against a baseline, as a JSON document and as findings."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, Generic, TypeVar

from gpuprobe.analysis.baseline.check import ENVIRONMENT, INCOMPLETE, regression
from gpuprobe.analysis.baseline.model import CheckResult, MetricResult, Setting
from gpuprobe.analysis.compare.diff import BY, DiffRow
from gpuprobe.model.findings import Finding, Fix
from gpuprobe.model.io.encoder import keys
from gpuprobe.model.place import Place, parse_place
from gpuprobe.model.record import record
from gpuprobe.model.text import amount, amount_delta
from gpuprobe.reporters.json.documents import Document

T = TypeVar("T")


@dataclass(frozen=True)
class OfRun(Generic[T]):
    """A row, with the name of its run if there are several."""

    run: Annotated[str | None, "the run, if there are several"]
    row: T


@record(frozen=True)
class CheckCommands:
    """What to run after memory grew."""

    accept: Annotated[str, "makes this run the baseline"]
    reproduce: Annotated[str, "the shortest command that makes the same comparison"]


@record(frozen=True)
class Check:
    """A check of one or several runs."""

    ok: bool
    cause: Annotated[str, "of the largest growth, in words"]
    metrics: tuple[OfRun[MetricResult], ...]
    phases: tuple[OfRun[MetricResult], ...]
    rows: Annotated[
        dict[str, tuple[OfRun[DiffRow], ...]] | None,
        "what changed by category, module, line and need; each table sums to the change of the "
        "peak; by need it is empty unless both runs traced the uses of memory",
    ]
    trials: Annotated[tuple[str, ...], "how the causes were found: by which runs, or why by none"]
    mismatches: Annotated[tuple[str, ...], "why the two cannot be compared"]
    incomplete: Annotated[tuple[str, ...], "what is missing from the recordings"]
    cautions: tuple[str, ...]
    settings: Annotated[tuple[OfRun[Setting], ...], "the settings of the check, with their sources"]
    commands: Annotated[tuple[OfRun[CheckCommands], ...], "for each run that is above its baseline"]


DOCUMENT: Final = Document(
    "gpuprobe.check",
    (2, 6),
    Check,
    "A run compared with a baseline. Sizes are bytes. A minor version adds keys.",
    shapes={
        OfRun: {"run?": "run", "*row": "row"},
        MetricResult: keys(
            "name unit before after limit delta regressed accepted source cause place unexplained "
            "causes rows"
        ),
        DiffRow: keys("key before after delta status moved_from need"),
    },
    added={"2.1": "MetricResult.causes", "2.2": "OfRun.run"}
    | {
        "2.3": "trials Cause.saved MetricResult.unexplained",
        "2.4": "commands",
        "2.5": "incomplete",
        "2.6": "DiffRow.need",
    },
)


def check_of(results: Sequence[CheckResult]) -> Check:
    """What the document is made from: the entries of all runs, run by run."""

    def rows(by: str) -> tuple[OfRun[DiffRow], ...]:
        return _of_runs((result, (result.rows or {}).get(by, ())) for result in results)

    compared = any(result.rows is not None for result in results)
    return Check(
        ok=all(result.ok for result in results),
        cause=next((_named(r, r.cause) for r in results if r.cause), ""),
        metrics=_of_runs((result, result.metrics) for result in results),
        phases=_of_runs((result, result.phases) for result in results),
        rows={by: rows(by) for by in BY} if compared else None,
        trials=tuple(_named(result, result.trials) for result in results if result.trials),
        mismatches=tuple(_named(r, text) for r in results for text in r.mismatches),
        incomplete=tuple(_named(r, text) for r in results for text in r.incomplete),
        cautions=tuple(_named(r, text) for r in results for text in r.cautions),
        settings=_of_runs((result, result.settings) for result in results),
        commands=_of_runs(
            (r, (CheckCommands(r.accept, r.reproduce),)) for r in results if r.accept
        ),
    )


def document(*results: CheckResult) -> dict[str, Any]:
    """The check as plain data."""
    return DOCUMENT.plain(check_of(results))


def _named(result: CheckResult, text: str) -> str:
    return f"{result.run}: {text}" if result.run else text


def _of_runs(rows: Iterable[tuple[CheckResult, Iterable[T]]]) -> tuple[OfRun[T], ...]:
    return tuple(OfRun(result.run or None, row) for result, some in rows for row in some)


def findings(*results: CheckResult) -> list[Finding]:
    """Findings for SARIF, JUnit and annotations: each regression, at the first line to inspect,
    each difference from the baseline's environment, and what is missing from the recording. A phase
    that grew for a reason already reported is left out.
    """
    return [finding for result in results for finding in _findings(result)]


def passed(*results: CheckResult) -> list[str]:
    """The metrics that are within the baseline, as the findings of those that are not are called
    (their ``subject``)."""
    return [
        _named(result, metric.name)
        for result in results
        for metric in (*result.metrics, *result.phases)
        if not metric.regressed
    ]


def _findings(result: CheckResult) -> Iterator[Finding]:
    if result.incomplete:
        yield INCOMPLETE.finding(
            f"the recording is incomplete: {_named(result, '; '.join(result.incomplete))}",
            fix=INCOMPLETE.remedy,
            subject=_named(result, "recording"),
        )
    for text in result.mismatches:
        yield ENVIRONMENT.finding(
            f"the baseline is from another environment: {_named(result, text)}",
            fix=ENVIRONMENT.remedy,
            subject=_named(result, text.partition(":")[0]),
        )
    given = set()
    for metric in result.regressions:
        if metric in result.phases and metric.place in given:
            continue
        given.add(metric.place)
        change = amount_delta(metric.delta, metric.unit)
        now = amount(metric.after, metric.unit)
        id, rule = regression(metric.name)
        name = _named(result, metric.name)
        yield Finding(
            rule=id,
            kind=rule.kind,
            level=rule.level,
            message=f"{name} is {change} above the baseline, now {now}. {metric.cause}",
            location=_location(metric.place),
            fix=Fix(rule.remedy),
            subject=name,
        )


def _location(text: str) -> Place | None:
    place = parse_place(text)
    return place if isinstance(place, Place) and place.file else None
