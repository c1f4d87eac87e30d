"""Findings: what is wrong, the evidence, and what to do. The shape follows SARIF 2.1.0."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from enum import Enum

from gpuprobe.model.place import Place

__all__ = ["Finding", "Fix", "Level"]


class Level(str, Enum):
    """SARIF's result levels."""

    ERROR = "error"
    WARNING = "warning"
    NOTE = "note"


@dataclass(frozen=True, slots=True)
class Fix:
    """What to do: one sentence, and the code or command where there is one."""

    text: str
    code: str = ""


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
    count: int = 1
    subject: str = ""  # what it is about: a device UUID, a tensor name, a variable
    fingerprint: str = field(default="")

    def __post_init__(self) -> None:
        if not self.fingerprint:
            # Survives line shifts: no line numbers, no measured values.
            where = f"{self.location.file}:{self.location.function}" if self.location else ""
            key = "\0".join((self.rule, self.kind, self.subject, where))
            digest = hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()[:16]
            object.__setattr__(self, "fingerprint", digest)
