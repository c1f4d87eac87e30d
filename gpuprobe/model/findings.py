"""Findings: what is wrong, the evidence, and what to do. The shape follows SARIF 2.1.0."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Annotated

from gpuprobe.model.place import Place
from gpuprobe.model.record import record
from gpuprobe.model.values import Count, Displayed


class Level(str, Enum):
    """SARIF's result levels."""

    ERROR = "error"
    WARNING = "warning"
    NOTE = "note"


@record(frozen=True, slots=True)
class Insertion:
    """Text for a source file: ``text`` is inserted before line ``line`` (from 1) and replaces
    ``replaces`` lines.
    """

    file: str
    line: int
    text: str
    replaces: int = 0


@record(frozen=True, slots=True)
class Fix:
    """What to do: one sentence, and the code or command if any. ``diff`` is the change of the
    program's source as a unified diff, if its lines are known.
    """

    text: str
    code: str = ""
    diff: str = ""

    @property
    def insertions(self) -> tuple[Insertion, ...]:
        """The changes of the diff, each relative to the source as it was."""
        return tuple(_insertions(self.diff))


def _insertions(diff: str) -> Iterator[Insertion]:
    """What a unified diff changes: each series of lines that are taken out or put in."""
    file, line, text, replaces = "", 0, "", 0
    for row in [*diff.splitlines(keepends=True), " "]:
        if row.startswith("+") and not row.startswith("+++ b/"):
            text += row[1:]
        elif row.startswith("-") and not row.startswith("--- a/"):
            replaces += 1
        elif row.startswith("\\"):  # no newline at the end of the file
            text = text.removesuffix("\n")
        else:
            if text or replaces:
                yield Insertion(file, line, text, replaces)
                line, text, replaces = line + replaces, "", 0
            if row.startswith("+++ b/"):
                file = row[6:].rstrip("\n")
            elif row.startswith("@@ -"):
                start, _, count = row[4:].partition(" ")[0].partition(",")
                line = int(start) + (count == "0")
            elif row.startswith(" "):
                line += 1


@dataclass(frozen=True, slots=True)
class Finding(Displayed):
    """One result of a rule.

    ``rule`` is a stable id (``GP101``…); ``kind`` a name such as ``read-after-write`` or
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
    subject: Annotated[
        str, "what it is about: a device UUID, a tensor name, a variable, operators, a rank"
    ] = ""
    fingerprint: str = field(default="")

    def __post_init__(self) -> None:
        if not self.fingerprint:
            import hashlib  # 4 ms, and most recordings have no findings

            # Survives line shifts: no line numbers, no measured values.
            where = f"{self.location.file}:{self.location.function}" if self.location else ""
            key = "\0".join((self.rule, self.kind, self.subject, where))
            digest = hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()[:16]
            object.__setattr__(self, "fingerprint", digest)

    def __repr__(self) -> str:
        where = "" if self.location is None else f" at {self.location}"
        return f"<{self.level.value} {self.rule} {self.kind}{where}: {self.message}>"
