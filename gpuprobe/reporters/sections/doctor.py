"""A diagnosis: its findings, then the checks that passed, then those that could not run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from gpuprobe.model.findings import Finding, Level
from gpuprobe.model.machine.diagnosis import (
    DeviceVerdict,
    Diagnosis,
    NotChecked,
    RankDiagnosis,
)
from gpuprobe.model.text import human_bytes, human_ns, plural
from gpuprobe.model.values import Unavailable
from gpuprobe.reporters.sections.parts import (
    AUTO,
    Code,
    Column,
    Line,
    Part,
    Row,
    Section,
    Table,
    items,
    size,
)


def doctor_sections(diagnosis: Diagnosis) -> list[Section]:
    """The diagnosis of a machine."""
    demo, devices = diagnosis.demo, diagnosis.devices
    facts = [
        *([f"demo fleet {demo}"] if demo else []),
        f"driver {_or_none(diagnosis.driver)}",
        *([] if demo else [f"torch {_or_none(diagnosis.torch)}"]),
        "no GPUs" if isinstance(devices, Unavailable) else plural(devices, "GPU"),
    ]
    return [
        _summary(diagnosis.findings, ", ".join(facts)),
        *_verdicts(diagnosis.verdicts),
        *map(_finding, diagnosis.findings),
        *_passed([_within(info.title) for info in diagnosis.passed]),
        *_not_checked(diagnosis.not_checked),
    ]


def rank_doctor_sections(diagnosis: RankDiagnosis) -> list[Section]:
    """The diagnosis of a distributed job."""
    expected = diagnosis.world_size
    number = "an unknown number of" if isinstance(expected, Unavailable) else str(expected)
    backend = "" if isinstance(diagnosis.backend, Unavailable) else f", {diagnosis.backend}"
    tables = (_joined(diagnosis), _speeds(diagnosis), _links(diagnosis))
    return [
        _summary(diagnosis.findings, f"{len(diagnosis.joined)} of {number} ranks{backend}"),
        *map(_finding, diagnosis.findings),
        *_passed(diagnosis.steps),
        *(Section(parts=(table,)) for table in tables if table.rows),
        *_not_checked(diagnosis.not_checked),
    ]


def _or_none(value: str | Unavailable) -> str:
    return "none" if isinstance(value, Unavailable) else value


def _within(title: str) -> str:
    """A title in the middle of a sentence: "No GPU" is "no GPU", but "PCIe" stays."""
    return title[0].lower() + title[1:] if title[1:2].islower() or title[1] == " " else title


def _summary(findings: Sequence[Finding], facts: str) -> Section:
    counts = [
        plural(number, level.value)
        for level in Level
        if (number := sum(finding.level is level for finding in findings))
    ]
    text = f"{', '.join(counts) or 'Nothing found'} ({facts})"
    return Section(parts=(Line(text, indent=0),))


def _verdicts(verdicts: Sequence[DeviceVerdict]) -> list[Section]:
    """A row for each GPU: its most severe level, and its findings in short."""
    rows = []
    for one in verdicts:
        found = [*dict.fromkeys(found.rule for found in one.findings)]
        if one.not_checked:
            found.append(f"{plural(one.not_checked, 'check')} could not run")
        level = "ok" if one.level is None else one.level.value
        rows.append(Row((one.name, level, ", ".join(found)), flagged=one.level is Level.ERROR))
    columns = (
        Column("GPU", AUTO),
        Column("verdict", 8, gap=2),
        Column("findings", 0, gap=2, cut=False),
    )
    table = Table("verdict on each GPU", columns, tuple(rows), indent=0)
    return [Section(parts=(table,))] if rows else []


def _finding(finding: Finding) -> Section:
    parts: list[Part] = [Line(value, "item", name) for name, value in finding.evidence]
    if finding.fix is not None:
        parts.append(Line(finding.fix.text, label="fix"))
        parts.append(Code(finding.fix.code, indent=7))
    title = f"{finding.level.value} {finding.rule}: {finding.message}"
    return Section(title, tuple(parts), level=finding.level)


def _passed(what: Sequence[str]) -> list[Section]:
    text = f"Passed ({len(what)}): {'; '.join(what)}."
    return [Section(parts=(Line(text, "item", indent=0),))] if what else []


def _not_checked(entries: Iterable[NotChecked]) -> list[Section]:
    by_reason: dict[str, list[str]] = {}
    for entry in entries:
        by_reason.setdefault(entry.reason, []).append(f"{entry.rule.id} {entry.rule.kind}")
    number = sum(map(len, by_reason.values()))
    lines = items(f"{reason}: {', '.join(rules)}" for reason, rules in by_reason.items())
    return [Section(f"{plural(number, 'check')} could not run:", lines)] if lines else []


def _joined(diagnosis: RankDiagnosis) -> Table:
    clocks = {}
    for skew in diagnosis.skews:
        sign = "-" if skew.ahead_ns < 0 else ""
        clocks[skew.rank] = f"{sign}{human_ns(abs(skew.ahead_ns))} ± {human_ns(skew.error_ns)}"
    columns = (
        Column("rank", 4, number=True),
        Column("local", 5, gap=2, number=True),
        Column("clock ahead of rank 0", 22, gap=2),
        Column("host and device", 0, gap=2, cut=False),
    )
    rows = tuple(
        Row(
            (
                str(place.rank),
                str(place.local_rank),
                clocks.get(place.rank, "-"),
                f"{place.host} {place.device}",
            )
        )
        for place in diagnosis.joined
    )
    return Table("ranks that joined", columns, rows, indent=0)


def _speeds(diagnosis: RankDiagnosis) -> Table:
    columns = (
        Column("all-reduce", 10),
        Column("latency", 10, gap=2),
        Column("bus bandwidth", 0, gap=2),
    )
    rows = tuple(
        Row(
            (
                size(speed.size),
                human_ns(speed.latency_ns),
                f"{human_bytes(int(speed.bus_bandwidth))}/s",
            )
        )
        for speed in diagnosis.speeds
    )
    return Table("speed of all-reduces", columns, rows, indent=0)


_MOST_LINKS = 16


def _links(diagnosis: RankDiagnosis) -> Table:
    """The slowest links."""
    slowest = sorted(diagnosis.links, key=lambda link: (-link.latency_ns, link.target))
    rows = tuple(
        Row(
            (
                f"{link.source} to {link.target}",
                human_ns(link.latency_ns),
                f"{human_bytes(int(link.size * 1e9 / max(1, link.latency_ns)))}/s",
            )
        )
        for link in slowest[:_MOST_LINKS]
    )
    columns = (Column("link", 10), Column("4 MiB in", 10, gap=2), Column("bandwidth", 0, gap=2))
    return Table("speed of links", columns, rows, indent=0)
