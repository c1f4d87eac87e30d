"""A watch for hazards as a JSON document."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, TextIO

from gpuprobe.hazards.findings.known import Comparison
from gpuprobe.hazards.findings.results import Hazards, SyncRow
from gpuprobe.model.findings import Finding, place_document, to_document
from gpuprobe.model.io.codec import from_plain
from gpuprobe.model.io.document import check_version, header
from gpuprobe.model.io.document import write as write_document
from gpuprobe.model.place import Place
from gpuprobe.reporters.json import schema as load_schema

SCHEMA: Final = "gpuprobe.hazards"
VERSION: Final = (2, 2)
"""(major, minor); a minor version only adds keys.

History:
* 1.0: first version.
* 1.1: ``self_waits`` and ``baseline``.
* 2.0: a finding has ``subject``, as in every document. ``schemas/hazards-2.json``.
* 2.1: ``failed`` and ``ranks``.
* 2.2: a fix has ``diff`` where it changes known lines of the program.
"""


def document(hazards: Hazards) -> dict[str, Any]:
    """Everything that was found, as plain data."""
    return {
        **header(SCHEMA, VERSION),
        "operations": hazards.operations,
        "findings": [to_document(finding) for finding in hazards.findings],
        "syncs": [
            {
                "reason": row.reason,
                "location": place_document(row.location),
                "count": row.count,
                "seconds": row.seconds,
                "allowed": row.allowed,
                "replacement": row.replacement,
            }
            for row in hazards.syncs
        ],
        "redundant_waits": [
            {"location": place_document(place), "count": count}
            for place, count in hazards.redundant
        ],
        "self_waits": [place_document(place) for place in hazards.self_waits],
        "coverage": list(hazards.coverage),
        "failed": hazards.failed or None,
        "ranks": list(hazards.ranks) or None,
        "baseline": None if hazards.comparison is None else _comparison(hazards.comparison),
    }


def _comparison(comparison: Comparison) -> dict[str, Any]:
    return {
        "new": [finding.fingerprint for finding in comparison.new],
        "known": [finding.fingerprint for finding in comparison.known],
        "gone": [row.fingerprint for row in comparison.gone],
    }


def from_document(document: dict[str, Any], where: str) -> Hazards:
    """What `document` was made of, without what its baseline has and this run has not.

    ``where`` begins the messages. Raises UnsupportedSchema for a newer major version, DataError
    for data of another shape.
    """
    check_version(document, VERSION, where)
    rows = from_plain(_Rows, document, where)
    baseline = document.get("baseline")
    comparison = None
    if baseline is not None:
        marks = from_plain(_Marks, baseline, where)
        new = [finding for finding in rows.findings if finding.fingerprint in marks.new]
        known = [finding for finding in rows.findings if finding.fingerprint in marks.known]
        comparison = Comparison(tuple(new), tuple(known), ())
    return Hazards(
        findings=list(rows.findings),
        syncs=list(rows.syncs),
        redundant=[(row.location, row.count) for row in rows.redundant_waits],
        coverage=list(rows.coverage),
        operations=rows.operations,
        self_waits=list(rows.self_waits),
        comparison=comparison,
        failed=rows.failed or "",
        ranks=rows.ranks or (),
    )


@dataclass(frozen=True, slots=True)
class _Waits:
    location: Place | None
    count: int


@dataclass(frozen=True, slots=True)
class _Rows:
    operations: int
    findings: tuple[Finding, ...]
    syncs: tuple[SyncRow, ...]
    redundant_waits: tuple[_Waits, ...]
    coverage: tuple[str, ...]
    self_waits: tuple[Place | None, ...] = ()  # since 1.1
    failed: str | None = None  # since 2.1
    ranks: tuple[int, ...] | None = None  # since 2.1


@dataclass(frozen=True, slots=True)
class _Marks:
    new: tuple[str, ...]
    known: tuple[str, ...]


def write(hazards: Hazards, stream: TextIO) -> None:
    """Write one JSON document, ASCII only."""
    write_document(document(hazards), stream)


def schema() -> dict[str, Any]:
    """The JSON Schema of the document."""
    return load_schema("hazards-2")
