"""A check against a baseline, as a JSON document and as findings."""

from __future__ import annotations

from typing import Any, Final, TextIO

from gpuprobe.analysis.baseline import CheckResult, MetricResult
from gpuprobe.analysis.baseline.rules import ENVIRONMENT, regression
from gpuprobe.model.findings import Finding, Fix
from gpuprobe.model.io.document import header
from gpuprobe.model.io.document import write as write_document
from gpuprobe.model.place import Place, parse_place
from gpuprobe.model.text import human_bytes, human_delta
from gpuprobe.reporters.json import fields_of

SCHEMA: Final = "gpuprobe.check"
VERSION: Final = (2, 1)
"""(major, minor); a minor version only adds keys.

History:
* 1.0: first version.
* 1.1: ``settings``; ``accepted``, ``source``, ``cause``, ``place`` and ``rows`` of each metric.
* 2.0: with all documents; nothing changed in this one. ``schemas/check-2.json``.
* 2.1: ``causes`` of each metric.
"""


def document(result: CheckResult) -> dict[str, Any]:
    """The check as plain data. Sizes are bytes."""
    return {
        **header(SCHEMA, VERSION),
        "ok": result.ok,
        "cause": result.cause,
        "metrics": [_metric(metric) for metric in result.metrics],
        "phases": [_metric(metric) for metric in result.phases],
        "rows": None
        if result.rows is None
        else {by: [fields_of(row, _ROW) for row in rows] for by, rows in result.rows.items()},
        "mismatches": list(result.mismatches),
        "cautions": list(result.cautions),
        "settings": [fields_of(setting, "name value source") for setting in result.settings],
    }


def _metric(metric: MetricResult) -> dict[str, Any]:
    found = fields_of(metric, _METRIC)
    found["causes"] = [fields_of(cause, "text place") for cause in metric.causes]
    found["rows"] = None if metric.rows is None else [fields_of(row, _ROW) for row in metric.rows]
    return found


_METRIC: Final = "name unit before after limit delta regressed accepted source cause place"
_ROW: Final = "key before after delta status moved_from"


def findings(result: CheckResult) -> list[Finding]:
    """Each regression as a finding at the first line to inspect, and each way in which the
    baseline is of another environment: for SARIF, JUnit and annotations. A phase that grew for a
    reason already given is left out.
    """
    found = [
        ENVIRONMENT.finding(
            f"the baseline is of another environment: {text}",
            fix=ENVIRONMENT.remedy,
            subject=text.partition(":")[0],
        )
        for text in result.mismatches
    ]
    given = set()
    for metric in result.regressions:
        if metric in result.phases and metric.place in given:
            continue
        given.add(metric.place)
        size = metric.unit == "bytes"
        change = human_delta(metric.delta) if size else f"{metric.delta:+d}"
        now = human_bytes(metric.after) if size else str(metric.after)
        id, rule = regression(metric.name)
        found.append(
            Finding(
                rule=id,
                kind=rule.kind,
                level=rule.level,
                message=f"{metric.name} is {change} above the baseline, now {now}. {metric.cause}",
                location=_location(metric.place),
                fix=Fix(rule.remedy),
                subject=metric.name,
            )
        )
    return found


def _location(text: str) -> Place | None:
    place = parse_place(text)
    return place if isinstance(place, Place) and place.file else None


def write(result: CheckResult, stream: TextIO) -> None:
    """Write one JSON document, ASCII only."""
    write_document(document(result), stream)
