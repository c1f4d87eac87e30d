"""A diagnosis as one JSON document: of a machine, or of the ranks of a job."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Final

from gpuprobe.model.findings import Finding
from gpuprobe.model.io.encoder import FINDING, NotEmpty, keys
from gpuprobe.model.machine.diagnosis import (
    SCHEMA_VERSION,
    DeviceVerdict,
    Diagnosis,
    NotChecked,
    RankDiagnosis,
)
from gpuprobe.model.rules import Rule
from gpuprobe.model.values import Matches, OneOf, ReadStatus, Unavailable
from gpuprobe.reporters.json.documents import Document

if TYPE_CHECKING:
    from gpuprobe.model.io.encoder import Shapes

_DESCRIPTION: Final = (
    "What was found wrong with a machine, or with the ranks of a distributed job. A minor version "
    "adds keys."
)

RuleId = Annotated[str, Matches("^GP1[0-9]{2}$")]


def _id(rule: Rule) -> RuleId:
    return rule.id


def _rule(finding: Finding) -> RuleId:
    return finding.rule


def _reason(entry: NotChecked) -> NotEmpty:
    return entry.reason


_REASONS = OneOf(tuple(status.value for status in ReadStatus if status is not ReadStatus.OK))


def _status(value: Unavailable) -> Annotated[str, _REASONS]:
    """How the attempt to read a value ended."""
    return value.status.value


def _rules(verdict: DeviceVerdict) -> Annotated[tuple[RuleId, ...], "of the findings about it"]:
    return tuple(finding.rule for finding in verdict.findings)


_SHAPES: Final[Shapes] = {
    Diagnosis: keys(
        "taken_at demo healthy driver torch devices findings passed not_checked verdicts"
    ),
    DeviceVerdict: {**keys("name level"), "rules": _rules, "not_checked": "not_checked"},
    Finding: {**FINDING, "rule": _rule},
    NotChecked: {"*rule": "rule", "reason": _reason},
    RankDiagnosis: keys(
        "healthy rank world_size backend joined missing findings steps not_checked speeds links "
        "skews"
    ),
    Unavailable: {"unavailable": "reason", "status": _status},
    Rule: {"id": _id, **keys("kind title")},
}

MACHINE: Final = Document(
    "gpuprobe.doctor",
    SCHEMA_VERSION,
    Diagnosis,
    _DESCRIPTION,
    shapes=_SHAPES,
    added={"2.1": "verdicts"},
)
"""``gpuprobe doctor --json``."""

RANKS: Final = Document(
    "gpuprobe.doctor-ranks",
    SCHEMA_VERSION,
    RankDiagnosis,
    _DESCRIPTION,
    shapes=_SHAPES,
)
"""``gpuprobe doctor --distributed --json``."""
