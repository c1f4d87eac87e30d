"""The results of a check for hazards, of one rank or of several together."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Final

from gpuprobe.hazards.rules import LATENT
from gpuprobe.model.findings import Finding
from gpuprobe.model.place import Place
from gpuprobe.model.text import plural
from gpuprobe.model.values import Displayed


def ending(error: BaseException | None, code: int = 1) -> str:
    """How a failed program ended, in one line."""
    if error is None:
        return f"exit code {code}"
    first, _, _ = str(error).partition("\n")
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


class Proof(Enum):
    """Whether a fix removes its race, by a replay of the repaired run. The values are the evidence
    of a finding, or its begin.
    """

    REMOVES = "yes"
    FAILS = "no"
    UNCHECKED = "not checked"

    @staticmethod
    def of(finding: Finding) -> Proof | None:
        """The proof in a finding's evidence; None if it has none."""
        text = dict(finding.evidence).get(PROOF, "")
        return next((one for one in Proof if text.partition(":")[0] == one.value), None)


PROOF: Final = "fix verified"
"""The name of the evidence."""


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
    host wait (kind ``implicit-sync``). ``syncs``: all synchronisations, also allowed and explicit
    ones. ``redundant``: waits without which everything would still be ordered. ``self_waits``:
    where a stream waits for itself (GP210). ``coverage``: blind spots. ``operations``: the number
    of launches. ``failed``: how the program failed, if it did. ``ranks``: those that were merged.
    """

    findings: list[Finding] = field(default_factory=list)
    syncs: list[SyncRow] = field(default_factory=list)
    redundant: list[tuple[Place | None, int]] = field(default_factory=list)
    coverage: list[str] = field(default_factory=list)
    operations: int = 0
    self_waits: list[Place | None] = field(default_factory=list)
    failed: str = ""
    ranks: tuple[int, ...] = ()

    def __repr__(self) -> str:
        waits = sum(finding.kind == "implicit-sync" for finding in self.findings)
        return (
            f"<hazards: {plural(len(self.races), 'race')}, "
            f"{plural(waits, 'implicit synchronisation')} "
            f"among {plural(self.operations, 'operation')}>"
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


def merge(found: Mapping[int, Hazards], world_size: int) -> Hazards:
    """The results of several ranks, as one. What several ranks found (the same fingerprint) is one
    finding, whose evidence lists them. ``coverage`` lists the missing ranks of ``world_size``.
    """
    ranks = sorted(found)
    whole = Hazards(
        ranks=tuple(ranks), findings=_merged_findings(found), syncs=_merged_syncs(found)
    )
    places: dict[Place | None, list[int]] = defaultdict(list)
    for rank in ranks:
        one = found[rank]
        whole.operations += one.operations
        whole.self_waits += [place for place in one.self_waits if place not in whole.self_waits]
        whole.coverage += [line for line in one.coverage if line not in whole.coverage]
        for place, count in one.redundant:
            places[place].append(count)
    # A wait that one rank needs is not redundant.
    whole.redundant = [
        (place, sum(counts)) for place, counts in places.items() if len(counts) == len(ranks)
    ]
    whole.failed = "; ".join(
        f"rank {rank}: {found[rank].failed}" for rank in ranks if found[rank].failed
    )
    missing = [str(rank) for rank in range(world_size) if rank not in found]
    if missing:
        whole.coverage.append(f"ranks without a result: {', '.join(missing)} of {world_size}")
    return whole


def _merged_findings(found: Mapping[int, Hazards]) -> list[Finding]:
    first: dict[tuple[str, int], Finding] = {}
    ranks: dict[tuple[str, int], list[int]] = defaultdict(list)
    for rank, one in sorted(found.items()):
        counts: dict[str, int] = defaultdict(int)  # one rank may have several of a fingerprint
        for finding in one.findings:
            key = (finding.fingerprint, counts[finding.fingerprint])
            counts[finding.fingerprint] += 1
            first.setdefault(key, finding)
            ranks[key].append(rank)
    return [
        replace(finding, evidence=(*finding.evidence, ("ranks", ", ".join(map(str, ranks[key])))))
        for key, finding in first.items()
    ]


def _merged_syncs(found: Mapping[int, Hazards]) -> list[SyncRow]:
    rows: dict[tuple[str, Place | None, bool], SyncRow] = {}
    for _, one in sorted(found.items()):
        for row in one.syncs:
            key = (row.reason, row.location, row.allowed)
            old = rows.get(key)
            if old is None:
                rows[key] = row
                continue
            measured = [spent for spent in (old.seconds, row.seconds) if spent is not None]
            rows[key] = replace(
                old, count=old.count + row.count, seconds=sum(measured) if measured else None
            )
    return list(rows.values())
