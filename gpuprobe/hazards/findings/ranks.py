"""What several ranks found, as one result."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace

from gpuprobe.hazards.findings.results import Hazards, SyncRow
from gpuprobe.model.findings import Finding
from gpuprobe.model.place import Place


def merge(found: Mapping[int, Hazards], world_size: int) -> Hazards:
    """The results of ``found``'s ranks together. What several ranks found (the same fingerprint)
    is one finding, whose evidence names them. ``coverage`` says which of ``world_size`` ranks are
    not among them.
    """
    ranks = sorted(found)
    whole = Hazards(ranks=tuple(ranks), findings=_findings(found), syncs=_syncs(found))
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


def _findings(found: Mapping[int, Hazards]) -> list[Finding]:
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


def _syncs(found: Mapping[int, Hazards]) -> list[SyncRow]:
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
