"""A diagnosis as one JSON document."""

from __future__ import annotations

from typing import Any

from gpuprobe.model.findings import to_document
from gpuprobe.model.io.codec import to_plain
from gpuprobe.model.io.document import header
from gpuprobe.model.machine.diagnosis import SCHEMA_VERSION, Diagnosis, NotChecked, RankDiagnosis
from gpuprobe.model.rules import Rule
from gpuprobe.reporters.json import schema as load_schema


def document(diagnosis: Diagnosis) -> dict[str, Any]:
    """``gpuprobe doctor --json`` as plain data, valid by `schema`."""
    return {
        **header("gpuprobe.doctor", SCHEMA_VERSION),
        "taken_at": diagnosis.taken_at,
        "demo": diagnosis.demo,
        "healthy": diagnosis.healthy,
        "driver": to_plain(diagnosis.driver),
        "torch": to_plain(diagnosis.torch),
        "devices": to_plain(diagnosis.devices),
        "findings": [to_document(finding) for finding in diagnosis.findings],
        "passed": [_rule(rule) for rule in diagnosis.passed],
        "not_checked": [_not_checked(entry) for entry in diagnosis.not_checked],
    }


def ranks_document(diagnosis: RankDiagnosis) -> dict[str, Any]:
    """``gpuprobe doctor --distributed --json`` as plain data, valid by `schema`."""
    return {
        **header("gpuprobe.doctor-ranks", SCHEMA_VERSION),
        "healthy": diagnosis.healthy,
        "rank": diagnosis.rank,
        "world_size": to_plain(diagnosis.world_size),
        "backend": to_plain(diagnosis.backend),
        "joined": [to_plain(place) for place in diagnosis.joined],
        "missing": list(diagnosis.missing),
        "findings": [to_document(finding) for finding in diagnosis.findings],
        "steps": list(diagnosis.steps),
        "not_checked": [_not_checked(entry) for entry in diagnosis.not_checked],
        "speeds": [to_plain(speed) for speed in diagnosis.speeds],
        "links": [to_plain(link) for link in diagnosis.links],
        "skews": [to_plain(skew) for skew in diagnosis.skews],
    }


def _rule(rule: Rule) -> dict[str, str]:
    return {"id": rule.id, "kind": rule.kind, "title": rule.title}


def _not_checked(entry: NotChecked) -> dict[str, Any]:
    return {**_rule(entry.rule), "reason": entry.reason}


def schema() -> dict[str, Any]:
    """The JSON Schema (draft 2020-12) of both documents, as shipped in the package."""
    return load_schema("doctor-2")
