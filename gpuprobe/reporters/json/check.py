"""A check against a baseline, as a JSON document and as findings."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, TextIO

from gpuprobe.analysis.baseline import CheckResult, MetricResult
from gpuprobe.analysis.baseline.check import ENVIRONMENT, regression
from gpuprobe.model.findings import Finding, Fix
from gpuprobe.model.io.document import header
from gpuprobe.model.io.document import write as write_document
from gpuprobe.model.place import Place, parse_place
from gpuprobe.model.text import human_bytes, human_delta
from gpuprobe.reporters.json import fields_of

SCHEMA: Final = "gpuprobe.check"
VERSION: Final = (2, 3)
"""(major, minor); a minor version only adds keys.

History:
* 1.0: first version.
* 1.1: ``settings``; ``accepted``, ``source``, ``cause``, ``place`` and ``rows`` of each metric.
* 2.0: with all documents; nothing changed in this one. ``schemas/check-2.json``.
* 2.1: ``causes`` of each metric.
* 2.2: ``run`` of each metric, row and setting, if there are several runs.
* 2.3: ``trials``; ``saved`` of each cause, ``unexplained`` of each metric, from runs without parts
  of the change.
"""


def document(*results: CheckResult) -> dict[str, Any]:
    """The check as plain data. Sizes are bytes. Entries of several runs are listed run by run, each
    with its ``run``."""
    rows = None
    if any(result.rows is not None for result in results):
        rows = {
            by: [
                _of(result, fields_of(row, _ROW))
                for result in results
                for row in (result.rows or {}).get(by, ())
            ]
            for by in ("category", "module", "line")
        }
    return {
        **header(SCHEMA, VERSION),
        "ok": all(result.ok for result in results),
        "cause": next((_named(r, r.cause) for r in results if r.cause), ""),
        "metrics": [_metric(result, metric) for result in results for metric in result.metrics],
        "phases": [_metric(result, metric) for result in results for metric in result.phases],
        "rows": rows,
        "trials": [_named(result, result.trials) for result in results if result.trials],
        "mismatches": [_named(result, text) for result in results for text in result.mismatches],
        "cautions": [_named(result, text) for result in results for text in result.cautions],
        "settings": [
            _of(result, fields_of(setting, "name value source"))
            for result in results
            for setting in result.settings
        ],
    }


def _named(result: CheckResult, text: str) -> str:
    return f"{result.run}: {text}" if result.run else text


def _of(result: CheckResult, plain: dict[str, Any]) -> dict[str, Any]:
    return {"run": result.run, **plain} if result.run else plain


def _metric(result: CheckResult, metric: MetricResult) -> dict[str, Any]:
    found = _of(result, fields_of(metric, _METRIC))
    found["unexplained"] = metric.unexplained
    found["causes"] = [fields_of(cause, "text place saved") for cause in metric.causes]
    found["rows"] = None if metric.rows is None else [fields_of(row, _ROW) for row in metric.rows]
    return found


_METRIC: Final = "name unit before after limit delta regressed accepted source cause place"
_ROW: Final = "key before after delta status moved_from"


def findings(*results: CheckResult) -> list[Finding]:
    """Findings for SARIF, JUnit and annotations: each regression, at the first line to inspect, and
    each difference from the baseline's environment. A phase that grew for a reason already reported
    is left out.
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
        size = metric.unit == "bytes"
        change = human_delta(metric.delta) if size else f"{metric.delta:+d}"
        now = human_bytes(metric.after) if size else str(metric.after)
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


def write(*results: CheckResult, stream: TextIO) -> None:
    """Write one JSON document, ASCII only."""
    write_document(document(*results), stream)
