"""Findings as SARIF 2.1.0, for code scanning. Format: docs.oasis-open.org/sarif/sarif/v2.1.0."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Sequence
from pathlib import PurePath
from typing import Any, Final, TextIO
from urllib.parse import quote

import gpuprobe.hazards.rules  # noqa: F401 (findings that were read are of its rules too)
from gpuprobe._version import __version__
from gpuprobe.model.findings import Finding
from gpuprobe.model.place import Place
from gpuprobe.model.rules import rule_of

_SCHEMA: Final = "https://json.schemastore.org/sarif-2.1.0.json"


def document(
    findings: Sequence[Finding],
    root: str = "",
    known: Sequence[Finding] | None = None,
    failed: str = "",
) -> dict[str, Any]:
    """One run. Paths below ``root`` are written relative to it, as code scanning needs them.

    ``known``: those of the findings that a baseline has. Given, each result says whether it is
    new (SARIF's ``baselineState``, 3.27.24). ``failed``: how the program ended that was watched,
    where it failed (``invocations``, 3.20).
    """
    rules: dict[str, dict[str, Any]] = {}
    results = []
    for finding in findings:
        rules.setdefault(finding.rule, _rule(finding))
        text = finding.message
        if finding.fix is not None:
            text = f"{text} {finding.fix.text}"
        result: dict[str, Any] = {
            "ruleId": finding.rule,
            "ruleIndex": list(rules).index(finding.rule),
            "level": finding.level.value,
            "message": {"text": _LINK.sub(r"\\[", text)},
            "partialFingerprints": {"gpuprobe/v1": finding.fingerprint},
        }
        if known is not None:
            old = any(finding is item for item in known)
            result["baselineState"] = "unchanged" if old else "new"
        if finding.location is not None:
            result["locations"] = [_location(finding.location, root)]
        if finding.related:
            result["relatedLocations"] = [
                {"id": at, **_location(place, root)} for at, place in enumerate(finding.related, 1)
            ]
        results.append(result)
    driver = {"name": "gpuprobe", "version": __version__, "rules": list(rules.values())}
    run: dict[str, Any] = {"tool": {"driver": driver}, "results": results}
    if failed:
        run["invocations"] = [{"executionSuccessful": False, "exitCodeDescription": failed}]
    return {"$schema": _SCHEMA, "version": "2.1.0", "runs": [run]}


# Of a message, ``[words](target)`` is a link, unless the bracket is escaped (SARIF 3.11.6).
_LINK = re.compile(r"\[(?=[^\]]*\]\()")


def _rule(finding: Finding) -> dict[str, Any]:
    """The rule's descriptor (SARIF 3.49). One that is not in the registry has its kind for a
    title."""
    known = rule_of(finding.rule)
    found: dict[str, Any] = {
        "id": finding.rule,
        "name": finding.kind,
        "shortDescription": {"text": known.title if known else finding.kind},
        "defaultConfiguration": {"level": (known.level if known else finding.level).value},
    }
    if known and known.description:
        found["fullDescription"] = {"text": known.description}
    if known and known.remedy:
        found["help"] = {"text": known.remedy}
    return found


def _location(place: Place, root: str) -> dict[str, Any]:
    path = PurePath(place.file)
    if root and path.is_absolute():
        with contextlib.suppress(ValueError):  # elsewhere: an absolute address
            path = path.relative_to(root)
    found: dict[str, Any] = {
        "physicalLocation": {
            "artifactLocation": {"uri": path.as_uri() if path.is_absolute() else _quoted(path)},
            "region": {"startLine": max(1, place.line)},
        }
    }
    if place.function:
        found["logicalLocations"] = [{"name": place.function}]
    return found


def _quoted(path: PurePath) -> str:
    """A relative path as a URI reference (RFC 3986): a colon would make it look like a scheme."""
    return quote(path.as_posix().encode("utf-8", "surrogateescape"), safe="/")


def write(
    findings: Sequence[Finding],
    stream: TextIO,
    root: str = "",
    known: Sequence[Finding] | None = None,
    failed: str = "",
) -> None:
    """Write one SARIF document, ASCII only."""
    json.dump(document(findings, root, known, failed), stream, indent=2)
    stream.write("\n")
