"""The findings of a check: while it is in progress, and at its end."""

from __future__ import annotations

import linecache
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Final

from gpuprobe.hazard_watch.names import place
from gpuprobe.hazard_watch.source import EventSource
from gpuprobe.hazards import rules
from gpuprobe.hazards.events import Site
from gpuprobe.hazards.findings.explain import finding, findings, source_of
from gpuprobe.hazards.findings.fingerprint import fingerprint
from gpuprobe.hazards.findings.results import PROOF, Hazards, SyncRow
from gpuprobe.hazards.ledger import REPLACEMENTS, LineEntry
from gpuprobe.model.findings import Finding, Fix
from gpuprobe.model.place import Place

_ALLOW_COMMENT: Final = "gpuprobe: allow"


def fill(found: Hazards, source: EventSource) -> None:
    """Explain all that the engines found, at the end of a check."""
    engine = source.engine
    found.operations = engine.operations
    source.ended = True
    engine.at_end()
    for one in (engine, *source.captures):
        items = findings(one, place)
        found.findings += [item for item in items if not _allowed(item.location)]
    # Waiting for the default stream on itself is what single-stream code does.
    waits = [sync.site for sync in engine.self_waits if engine.names[sync.waiter][1] != 0]
    found.self_waits += [place(site) for site in dict.fromkeys(waits)]
    for entry, location in _by_line(source.ledger.entries.values()):
        allowed = entry.allowed or _allowed(location)
        if entry.rule is rules.IMPLICIT_SYNC:
            replacement = REPLACEMENTS.get(entry.reason, "")
            found.syncs.append(
                SyncRow(entry.reason, location, entry.count, entry.seconds, allowed, replacement)
            )
        if not allowed:
            found.findings.append(_line_finding(entry, location))
    found.redundant += [(place(site), count) for site, count in engine.redundant.items()]
    found.coverage += source.coverage()


def _by_line(entries: Iterable[LineEntry]) -> list[tuple[LineEntry, Place | None]]:
    """Entries with their places; those of one line, for one reason, are merged."""
    merged: dict[tuple[str, str, bool], tuple[LineEntry, Place | None]] = {}
    for entry in entries:
        location = place(entry.site)
        key = (entry.reason, repr(entry.site) if location is None else str(location), entry.allowed)
        if key not in merged:
            merged[key] = replace(entry), location
            continue
        same, _ = merged[key]
        same.count += entry.count
        if entry.seconds is not None:
            same.seconds = (same.seconds or 0.0) + entry.seconds
    return list(merged.values())


def _line_finding(entry: LineEntry, location: Place | None) -> Finding:
    """One line of the ledger as a finding."""
    rule, reason = entry.rule, entry.reason
    times = "" if entry.count == 1 else f" ({entry.count} times)"
    return Finding(
        rule=rule.id,
        kind=rule.kind,
        level=rule.level,
        message=f"{rule.title}: {reason}{times}",
        location=location,
        fix=Fix(REPLACEMENTS.get(reason, "") or rule.remedy),
        count=entry.count,
        subject=reason,
        fingerprint=fingerprint(rule.id, rule.kind, reason, [source_of(location)]),
    )


def _allowed(location: Place | None) -> bool:
    """Whether the source line has a comment ``# gpuprobe: allow``."""
    if location is None:
        return False
    return _ALLOW_COMMENT in linecache.getline(location.file, location.line)


class FindingsSoFar:
    """New findings of a check in progress, for live views. A race is reported once; its fix is
    verified at the end, when each is reported again. A line that waits for the GPU is reported at
    once, and again each time its count has grown by a tenth.
    """

    def __init__(self, source: EventSource) -> None:
        self._source = source
        self._races_reported: dict[int, int] = {}  # by id of an engine
        self._counts: dict[
            tuple[str, Site], int
        ] = {}  # by line of the ledger: the count that was reported

    def news(self) -> list[Finding]:
        """New findings since the last call. Thread-safe."""
        return [*self._races(), *self._lines()]

    def _lines(self) -> Iterator[Finding]:
        for key, entry in tuple(self._source.ledger.entries.items()):
            count, reported = entry.count, self._counts.get(key, 0)
            if 10 * count < 11 * reported or count == reported:
                continue
            self._counts[key] = count
            location = place(entry.site)
            if not entry.allowed and not _allowed(location):
                yield _line_finding(replace(entry, count=count), location)

    def _races(self) -> Iterator[Finding]:
        for engine in (self._source.engine, *self._source.captures):
            reported = self._races_reported.get(id(engine), 0)
            races = engine.races[reported:]
            self._races_reported[id(engine)] = reported + len(races)
            for race in races:
                item = finding(engine, race, place, verify=False)
                if not _allowed(item.location):
                    evidence = tuple(pair for pair in item.evidence if pair[0] != PROOF)
                    yield replace(item, evidence=evidence)
