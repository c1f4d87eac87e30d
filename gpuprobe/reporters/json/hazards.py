"""A watch for hazards as a JSON document."""

from __future__ import annotations

import json
from importlib import resources
from typing import Any, Final, TextIO

from gpuprobe._version import __version__
from gpuprobe.hazards.known import Comparison
from gpuprobe.hazards.results import Hazards
from gpuprobe.model.findings import Finding
from gpuprobe.model.place import Place

__all__ = ["VERSION", "document", "schema", "write"]

VERSION: Final = (1, 1)
"""(major, minor); a minor version only adds keys.

History:
* 1.1: ``self_waits`` and ``baseline``.
* 1.0: first version. ``schemas/hazards-1.json`` is its JSON Schema.
"""


def document(hazards: Hazards) -> dict[str, Any]:
    """Everything that was found, as plain data."""
    return {
        "schema": "gpuprobe.hazards",
        "version": list(VERSION),
        "gpuprobe": __version__,
        "operations": hazards.operations,
        "findings": [_finding(finding) for finding in hazards.findings],
        "syncs": [
            {
                "reason": row.reason,
                "location": _place(row.location),
                "count": row.count,
                "seconds": row.seconds,
                "allowed": row.allowed,
                "replacement": row.replacement,
            }
            for row in hazards.syncs
        ],
        "redundant_waits": [
            {"location": _place(place), "count": count} for place, count in hazards.redundant
        ],
        "self_waits": [_place(place) for place in hazards.self_waits],
        "coverage": list(hazards.coverage),
        "baseline": None if hazards.comparison is None else _comparison(hazards.comparison),
    }


def _comparison(comparison: Comparison) -> dict[str, Any]:
    return {
        "new": [finding.fingerprint for finding in comparison.new],
        "known": [finding.fingerprint for finding in comparison.known],
        "gone": [row.fingerprint for row in comparison.gone],
    }


def _finding(finding: Finding) -> dict[str, Any]:
    return {
        "rule": finding.rule,
        "kind": finding.kind,
        "level": finding.level.value,
        "message": finding.message,
        "location": _place(finding.location),
        "related": [_place(place) for place in finding.related],
        "evidence": [{"name": name, "value": value} for name, value in finding.evidence],
        "fix": None
        if finding.fix is None
        else {"text": finding.fix.text, "code": finding.fix.code},
        "count": finding.count,
        "fingerprint": finding.fingerprint,
    }


def _place(place: Place | None) -> dict[str, Any] | None:
    if place is None:
        return None
    return {"file": place.file, "line": place.line, "function": place.function}


def write(hazards: Hazards, stream: TextIO) -> None:
    """Write one JSON document, ASCII only."""
    json.dump(document(hazards), stream, indent=2, allow_nan=False)
    stream.write("\n")


def schema() -> dict[str, Any]:
    """The JSON Schema of the document."""
    file = resources.files("gpuprobe.reporters.json") / "schemas" / "hazards-1.json"
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return found
