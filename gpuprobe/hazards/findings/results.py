"""What a watch for hazards found."""

from __future__ import annotations

from dataclasses import dataclass, field

from gpuprobe.hazards.findings.known import Comparison
from gpuprobe.hazards.rules import LATENT
from gpuprobe.model.display import Displayed
from gpuprobe.model.findings import Finding
from gpuprobe.model.place import Place


def ending(error: BaseException | None, code: int = 1) -> str:
    """How a program ended that failed, in a line."""
    if error is None:
        return f"exit code {code}"
    first, _, _ = str(error).partition("\n")
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


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
class Hazards(Displayed):
    """Findings of a checked region; filled in when it ends.

    ``findings``: one for each pair of places that race, then one for each line that makes the
    host wait (kind ``implicit-sync``). ``syncs`` is the complete ledger, including allowed and
    explicit synchronisations. ``redundant``: waits without which everything would still be ordered.
    ``self_waits``: where a stream waits for itself, which orders nothing (GP210). ``coverage``
    lists blind spots; ``operations`` is the number of launches. ``comparison``: the findings
    compared with a baseline, if any. ``failed``: how the program failed, if it did; the rest of it
    was not checked. ``ranks``: the ranks whose results were merged.
    """

    findings: list[Finding] = field(default_factory=list)
    syncs: list[SyncRow] = field(default_factory=list)
    redundant: list[tuple[Place | None, int]] = field(default_factory=list)
    coverage: list[str] = field(default_factory=list)
    operations: int = 0
    self_waits: list[Place | None] = field(default_factory=list)
    comparison: Comparison | None = None
    failed: str = ""
    ranks: tuple[int, ...] = ()

    def __repr__(self) -> str:
        waits = sum(finding.kind == "implicit-sync" for finding in self.findings)
        return (
            f"<hazards: {len(self.races)} races, {waits} implicit synchronisations "
            f"among {self.operations} operations>"
        )

    @property
    def races(self) -> list[Finding]:
        """Races of this run: findings that are neither implicit synchronisations nor latent."""
        return [
            finding
            for finding in self.findings
            if finding.kind != "implicit-sync" and finding.rule != LATENT.id
        ]

    @property
    def latent(self) -> list[Finding]:
        """Uses after free that did no harm because the memory was not reused."""
        return [finding for finding in self.findings if finding.rule == LATENT.id]
