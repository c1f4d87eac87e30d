"""Findings: what is wrong, the evidence, and what to do. The shape follows SARIF 2.1.0."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from gpuprobe.model.bounds import Count
from gpuprobe.model.place import Place
from gpuprobe.model.record import record


class Level(str, Enum):
    """SARIF's result levels."""

    ERROR = "error"
    WARNING = "warning"
    NOTE = "note"


@record(frozen=True, slots=True)
class Insertion:
    """Lines for a source file: ``text`` goes before line ``line`` (from 1), in place of that many
    lines as ``replaces`` says.
    """

    file: str
    line: int
    text: str
    replaces: int = 0


@record(frozen=True, slots=True)
class Fix:
    """What to do: one sentence, and the code or command where there is one. ``insertions`` are
    the change of the program's source, where its lines are known; ``diff`` is the same change as a
    unified diff.
    """

    text: str
    code: str = ""
    insertions: tuple[Insertion, ...] = ()
    diff: str = ""


@dataclass(frozen=True, slots=True)
class Finding:
    """One result of a rule.

    ``rule`` is a stable id (``GP001``…); ``kind`` a word such as ``read-after-write`` or
    ``throttling``; ``evidence`` what was observed, as (name, value) pairs in reading order.
    """

    rule: str
    kind: str
    level: Level
    message: str
    evidence: tuple[tuple[str, str], ...] = ()
    location: Place | None = None
    related: tuple[Place, ...] = ()
    fix: Fix | None = None
    count: Count = 1
    subject: str = ""  # what it is about: a device UUID, a tensor name, a variable
    fingerprint: str = field(default="")

    def __post_init__(self) -> None:
        if not self.fingerprint:
            import hashlib  # 4 ms, and most recordings have no findings

            # Survives line shifts: no line numbers, no measured values.
            where = f"{self.location.file}:{self.location.function}" if self.location else ""
            key = "\0".join((self.rule, self.kind, self.subject, where))
            digest = hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()[:16]
            object.__setattr__(self, "fingerprint", digest)


def to_document(finding: Finding) -> dict[str, Any]:
    """A finding as every JSON document and recording has it. Every key is always there, but a fix
    has ``insertions`` and ``diff`` only where it changes known lines of the program.
    """
    fix = finding.fix
    return {
        "rule": finding.rule,
        "kind": finding.kind,
        "level": finding.level.value,
        "message": finding.message,
        "subject": finding.subject,
        "location": place_document(finding.location),
        "related": [place_document(place) for place in finding.related],
        "evidence": [{"name": name, "value": value} for name, value in finding.evidence],
        "fix": None if fix is None else _fix_document(fix),
        "count": finding.count,
        "fingerprint": finding.fingerprint,
    }


def _fix_document(fix: Fix) -> dict[str, Any]:
    found: dict[str, Any] = {"text": fix.text, "code": fix.code}
    if fix.insertions:
        found["insertions"] = [
            {"file": one.file, "line": one.line, "text": one.text, "replaces": one.replaces}
            for one in fix.insertions
        ]
        found["diff"] = fix.diff
    return found


def place_document(place: Place | None) -> dict[str, Any] | None:
    """A place in the user's code as JSON has it; null where there is none."""
    if place is None:
        return None
    return {"file": place.file, "line": place.line, "function": place.function}
