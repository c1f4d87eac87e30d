"""What a watch for hazards found."""

from __future__ import annotations

from dataclasses import dataclass, field

from gpuprobe.hazards.known import Comparison
from gpuprobe.model.findings import Finding
from gpuprobe.model.place import Place

__all__ = ["Hazards", "SyncRow"]


@dataclass(frozen=True, slots=True)
class SyncRow:
    """One line of the sync ledger. ``seconds``: time lost, None where it was not measured."""

    reason: str
    location: Place | None
    count: int
    seconds: float | None
    allowed: bool
    replacement: str


@dataclass(slots=True)
class Hazards:
    """Findings of a region; filled in when it ends.

    ``findings``: one for each pair of places that race, then one for each line that makes the
    host wait (kind ``implicit-sync``). ``syncs`` is the whole ledger, with those that the program
    allowed or asked for. ``redundant``: waits without which everything would still be ordered.
    ``self_waits``: where a stream waits for itself, which orders nothing (GP210). ``coverage``
    says what was not seen; ``operations`` how many launches were judged. ``comparison``: the
    findings beside a baseline, where there is one.
    """

    findings: list[Finding] = field(default_factory=list)
    syncs: list[SyncRow] = field(default_factory=list)
    redundant: list[tuple[Place | None, int]] = field(default_factory=list)
    coverage: list[str] = field(default_factory=list)
    operations: int = 0
    self_waits: list[Place | None] = field(default_factory=list)
    comparison: Comparison | None = None

    @property
    def races(self) -> list[Finding]:
        """The findings that are not implicit synchronisations."""
        return [finding for finding in self.findings if finding.kind != "implicit-sync"]
