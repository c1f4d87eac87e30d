"""A diagnosis as one JSON document."""

from __future__ import annotations

import json
from importlib import resources
from typing import Any, TextIO

from gpuprobe.model.codec import to_plain
from gpuprobe.model.findings import Finding
from gpuprobe.model.machine.diagnosis import SCHEMA_VERSION, Diagnosis, NotChecked, RankDiagnosis

__all__ = ["document", "ranks_document", "schema", "write"]


def document(diagnosis: Diagnosis) -> dict[str, Any]:
    """``gpuprobe doctor --json`` as plain data, valid by `schema`."""
    return {
        "schema": "gpuprobe.doctor",
        "version": list(SCHEMA_VERSION),
        "gpuprobe": diagnosis.gpuprobe,
        "taken_at": diagnosis.taken_at,
        "demo": diagnosis.demo,
        "healthy": diagnosis.healthy,
        "driver": to_plain(diagnosis.driver),
        "torch": to_plain(diagnosis.torch),
        "devices": to_plain(diagnosis.devices),
        "findings": [_finding(finding) for finding in diagnosis.findings],
        "passed": [to_plain(info) for info in diagnosis.passed],
        "not_checked": [_not_checked(entry) for entry in diagnosis.not_checked],
    }


def ranks_document(diagnosis: RankDiagnosis, gpuprobe: str) -> dict[str, Any]:
    """``gpuprobe doctor --distributed --json`` as plain data, valid by `schema`."""
    return {
        "schema": "gpuprobe.doctor-ranks",
        "version": list(SCHEMA_VERSION),
        "gpuprobe": gpuprobe,
        "healthy": diagnosis.healthy,
        "rank": diagnosis.rank,
        "world_size": to_plain(diagnosis.world_size),
        "backend": to_plain(diagnosis.backend),
        "joined": [to_plain(place) for place in diagnosis.joined],
        "missing": list(diagnosis.missing),
        "findings": [_finding(finding) for finding in diagnosis.findings],
        "steps": list(diagnosis.steps),
        "not_checked": [_not_checked(entry) for entry in diagnosis.not_checked],
        "speeds": [to_plain(speed) for speed in diagnosis.speeds],
        "skews": [to_plain(skew) for skew in diagnosis.skews],
    }


def _finding(finding: Finding) -> dict[str, Any]:
    return {
        "rule": finding.rule,
        "kind": finding.kind,
        "level": finding.level.value,
        "message": finding.message,
        "subject": finding.subject,
        "count": finding.count,
        "fingerprint": finding.fingerprint,
        "evidence": [{"name": name, "value": value} for name, value in finding.evidence],
        "fix": None
        if finding.fix is None
        else {"text": finding.fix.text, "code": finding.fix.code},
    }


def _not_checked(entry: NotChecked) -> dict[str, Any]:
    return {**to_plain(entry.rule), "reason": entry.reason}


def write(document: dict[str, Any], stream: TextIO) -> None:
    """Write a document made here, ASCII only."""
    json.dump(document, stream, indent=2, allow_nan=False)
    stream.write("\n")


def schema() -> dict[str, Any]:
    """The JSON Schema (draft 2020-12) of both documents, as shipped in the package."""
    file = resources.files("gpuprobe.reporters.json") / "schemas" / "doctor-1.json"
    loaded: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return loaded
