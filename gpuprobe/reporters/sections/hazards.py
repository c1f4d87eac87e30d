"""A check for hazards: races with their source, waits of the host, and blind spots."""

from __future__ import annotations

from collections.abc import Iterable

from gpuprobe.hazards.findings.results import PROOF, Hazards, Proof, SyncRow
from gpuprobe.hazards.rules import SELF_WAIT
from gpuprobe.model.findings import Finding
from gpuprobe.model.place import Place
from gpuprobe.model.text import plural
from gpuprobe.reporters.sections.parts import (
    Cell,
    Code,
    Column,
    Facts,
    Line,
    Part,
    Row,
    Section,
    SourceExcerpt,
    Table,
    bulleted,
)

_MOST, _MOST_FULL = 20, 200


def hazard_sections(hazards: Hazards, *, full: bool = False) -> list[Section]:
    """The findings, at most `_MOST` of each kind. ``full``: up to `_MOST_FULL`, also the waits that
    the program allows, and all evidence.
    """
    most = _MOST_FULL if full else _MOST
    found = [_races(hazards, most, full)]
    found += _latent(hazards, most, full)
    found += _syncs(hazards.syncs, most, full)
    if hazards.redundant:
        rows = tuple(
            Row((Cell(f"{times} x", times), _place(place)))
            for place, times in hazards.redundant[:most]
        )
        columns = (Column("times", 7, number=True), Column("line", 0, gap=2, cut=False))
        table = Table("waits without effect", columns, rows, header=False)
        title = "Redundant waits: everything is synchronised without them"
        found.append(Section(title, (table,), "redundant-waits", "Redundant waits"))
    if hazards.self_waits:
        places = tuple(Line(_place(place).text) for place in hazards.self_waits[:most])
        remedy = Line(f"{SELF_WAIT.id}: {SELF_WAIT.remedy}", indent=6)
        title = "A stream waits for itself, which has no effect"
        found.append(Section(title, (*places, remedy), "self-waits", "Self-waits"))
    if hazards.coverage:
        title = "Blind spots"
        found.append(
            Section(title, bulleted(hazards.coverage), "hazards-not-seen", "Hazard blind spots")
        )
    return found


def _races(hazards: Hazards, most: int, full: bool) -> Section:
    races = hazards.races
    name, short = "hazards", "Hazards"
    if not races:
        title, text = _no_races(hazards.operations, hazards.failed)
        return Section(title, (Line(text),) if text else (), name, short)
    parts: list[Part] = [Line(_failed(hazards.failed))] if hazards.failed else []
    title = plural(len(races), "stream hazard")
    parts += [finding_section(race, full) for race in races[:most]]
    if len(races) > most:
        text = f"and {len(races) - most} more (all of them in the JSON document)"
        parts.append(Line(text, indent=0))
    return Section(title, tuple(parts), name, short)


def _no_races(operations: int, failed: str) -> tuple[str, str]:
    """The title without races, and a line or "" below it."""
    if failed:
        found = f"no stream hazards among the {operations} operations before that"
        title = f"The program failed; {found if operations else 'it launched nothing on a GPU'}"
        return title, _failed(failed)
    if not operations:
        return "Nothing to check: the program launched nothing on a GPU", ""
    title = f"No stream hazards among {operations} operations"
    return title, "see the blind spots below for what was not checked"


def _failed(failed: str) -> str:
    return f"the program failed ({failed}): the rest of it was not checked"


def finding_section(finding: Finding, full: bool = True) -> Section:
    """One finding. ``full``: with its evidence and places."""
    places = [*finding.related, *([finding.location] if finding.location else [])]
    parts: list[Part] = [Line(finding.message)]
    for one in places:
        parts += [Line(str(one), place=True), SourceExcerpt(one)] if full else [SourceExcerpt(one)]
    proof = Proof.of(finding)
    if full and finding.evidence:
        parts.append(Facts(finding.evidence))
    if finding.fix is not None:
        parts.append(Line(finding.fix.text, label="fix"))
        if finding.fix.diff:
            parts.append(Code(finding.fix.diff, indent=0))  # as git apply accepts it
        else:
            parts.append(Code(finding.fix.code, indent=7))
    if proof is not None and not full:
        parts.append(Line(_checked(proof, dict(finding.evidence)[PROOF]), indent=7))
        also_fixed = sum(name == "fixed by the same change" for name, _ in finding.evidence)
        if also_fixed:
            parts.append(Line(f"it fixes {plural(also_fixed, 'more race')} of this kind", indent=7))
    title = f"{finding.rule} {finding.kind}"
    if full and finding.count > 1:
        title += f" · {finding.count:,} times"
    place = "" if finding.location is None else _place(finding.location).text
    return Section(title, tuple(parts), level=finding.level, place="" if full else place)


def _checked(proof: Proof, evidence: str) -> str:
    """The result of replaying with the fix, as a sentence."""
    if proof is Proof.REMOVES:
        return f"checked: {evidence.removeprefix('yes: ')}"
    if proof is Proof.FAILS:
        return "replaying the run with this fix did not remove the race"
    return evidence


def _latent(hazards: Hazards, most: int, full: bool) -> list[Section]:
    """Memory that was freed too early, but not reused by the allocator in this run."""
    latent = hazards.latent
    if not latent:
        return []
    parts = tuple(finding_section(one, full) for one in latent[:most])
    title = f"Freed too early, without harm in this run: {len(latent)}"
    return [Section(title, parts, "latent", "Latent")]


def _syncs(syncs: Iterable[SyncRow], most: int, full: bool) -> list[Section]:
    rows = [row for row in syncs if full or not row.allowed]
    rows.sort(key=lambda row: (row.allowed, -row.count))
    if not rows:
        return []
    lines = []
    for row in rows[:most]:
        spent = "-" if row.seconds is None else f"{row.seconds * 1000:.2f} ms"
        cells = (
            Cell(f"{row.count} x", row.count),
            _place(row.location),
            row.reason,
            Cell(spent, row.seconds or -1.0),
            "yes" if row.allowed else Cell("no", tone="strong"),
        )
        lines.append(Row(cells, note=row.replacement))
    columns = (
        Column("times", 7, number=True),
        Column("line", 0, gap=2, cut=False),
        Column("why", 0, gap=2, cut=False),
        Column("waited", number=True),
        Column("allowed"),
    )
    table = Table("sync ledger", columns, tuple(lines), header=False, note_indent=11)
    return [Section("The host waits for the GPU at", (table,), "syncs", "Waits")]


def _place(location: Place | None) -> Cell:
    if location is None:
        return Cell("an unknown line")
    return Cell(f"{location.file}:{location.line}", place=True)
