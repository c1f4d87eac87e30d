"""The sections of a report on ranks: processes, placement, and differences."""

from __future__ import annotations

from gpuprobe.model.report import (
    AT_PEAK,
    AT_STEP_END,
    RankComparison,
    RankMemory,
    RankTime,
    Report,
    TimeDifference,
)
from gpuprobe.model.run.recording import ChildPeak
from gpuprobe.model.run.session import Placed
from gpuprobe.model.text import human_bytes, human_delta, human_ns, plural, ranges
from gpuprobe.model.values import Peak, Unavailable
from gpuprobe.reporters.sections.parts import (
    AUTO,
    Cell,
    Column,
    Line,
    Part,
    Row,
    Section,
    Table,
    bounds,
    change,
    count,
    duration,
    known_size,
    named,
    size,
)

_FEW = 5
_LONGEST = 60

MOST_DEVICES = 12
"""The most devices that a short report lists one by one; more are in groups."""

_MOST_STEPS = 200


def process_sections(report: Report) -> list[Section]:
    """Each rank's process."""
    rows = []
    for row in report.ranks:
        error = "" if row.error is None else f"{row.error.type}: {row.error.located}"
        spent = row.duration_ns
        rows.append(
            Row(
                (
                    Cell(str(row.rank), row.rank),
                    Cell(str(row.local_rank), row.local_rank),
                    row.hostname,
                    str(row.pid) if row.pid else "unknown",
                    row.status,
                    Cell(str(row.steps), row.steps),
                    Cell("-", -1, spent.reason)
                    if isinstance(spent, Unavailable)
                    else duration(spent),
                    bounds(row.host_rss_peak, full=True),
                    error,
                ),
                flagged=row.error is not None,
            )
        )
    columns = (
        Column("rank", 5, number=True),
        Column("local rank", number=True),
        Column("host", 16, gap=1),
        Column("pid", 9, number=True),
        Column("status", 11, gap=2),
        Column("steps", 6, number=True),
        Column("time", 10, number=True),
        Column("host memory", 12, number=True),
        Column("error"),
    )
    table = Table("processes", columns, tuple(rows))
    return [Section("Processes", (table,), "processes", "Processes")]


_FEW_CHILDREN, _MOST_CHILDREN = 8, 1_000
"""The most rows of a short report, and of a full one."""


def child_sections(report: Report, *, full: bool) -> list[Section]:
    """Processes that the program started, with their memory on each device; in short those with the
    most.
    """
    if not report.children:
        return []
    found = list(report.children)
    most = _MOST_CHILDREN if full else _FEW_CHILDREN
    if len(found) > most:
        found.sort(key=lambda row: -max((_least(peak.allocated) for peak in row.peaks), default=0))
    rows = []
    for child in found[:most]:
        error = "" if child.error is None else f"{child.error.type}: {child.error.located}"
        spent = child.duration_ns
        time = Cell("-", -1, spent.reason) if isinstance(spent, Unavailable) else duration(spent)
        for peak in child.peaks or (ChildPeak("-", _NOTHING, _NOTHING),):
            rows.append(
                Row(
                    (
                        child.name,
                        Cell(str(child.rank), child.rank),
                        str(child.pid),
                        child.status,
                        Cell(str(child.steps), child.steps),
                        time,
                        peak.device,
                        bounds(peak.allocated, full=full),
                        bounds(peak.reserved, full=full),
                        error,
                    ),
                    flagged=child.error is not None,
                )
            )
    columns = (
        Column("recording", AUTO, cut=False),
        Column("rank", number=True),
        Column("pid", number=True),
        Column("status", 10, gap=2),
        Column("steps", 6, number=True),
        Column("time", number=True),
        Column("device", 8, gap=2),
        Column("allocated", 11, number=True),
        Column("reserved", 11, number=True),
        Column("error"),
    )
    parts: list[Part] = [Table("processes started", columns, tuple(rows))]
    if len(found) > most:
        how = "--json lists" if full else "-v lists"
        parts.append(Line(f"… {len(found) - most} more: {how} them"))
    title = f"{plural(len(found), 'process')} that the program started and that used the GPU"
    return [Section(title, tuple(parts), "children", "Processes started")]


def children_line(report: Report) -> str:
    """How many processes used the GPU, and how much the largest one allocated."""
    peaks = [peak for child in report.children for peak in child.peaks]
    largest = max(peaks, key=lambda peak: _least(peak.allocated), default=None)
    most = ""
    if largest is not None:
        most = f", at most {human_bytes(_least(largest.allocated))} allocated on {largest.device}"
    return f"{plural(len(report.children), 'process')} that the program started used the GPU{most}"


_NOTHING = Unavailable("nothing was recorded")


def _least(peak: Peak | Unavailable) -> int:
    return 0 if isinstance(peak, Unavailable) else peak.at_least


# -- placement


def placement_sections(report: Report, *, full: bool) -> list[Section]:
    """The device of each part of the model. In short: only if there is more than one device."""
    rows = [row for row in report.placement if full or row.what == "module"]
    if not rows or (not full and len({row.device for row in rows}) < 2):
        return []
    parts: list[Part]
    if full:
        parts = [_placed(rows)]
    else:
        parts = [
            Line(f"{row.name} ({row.kind}, {human_bytes(row.bytes)})", "item", row.device)
            for row in rows[: 2 * _FEW]
        ]
        if len(rows) > 2 * _FEW:
            parts.append(Line(f"… {plural(len(rows) - 2 * _FEW, 'more part')}"))
    return [Section("Device placement", tuple(parts), "placement", "Placement")]


def _placed(rows: list[Placed]) -> Table:
    columns = (
        Column("device"),
        Column("what"),
        Column("name"),
        Column("kind"),
        Column("bytes", number=True),
    )
    shown = (Row((row.device, row.what, row.name, row.kind, size(row.bytes))) for row in rows)
    return Table("device placement", columns, tuple(shown))


# -- comparison


def comparison_sections(report: Report, *, full: bool) -> list[Section]:
    """The rank with the highest peak, the rank that others wait for, and the reasons."""
    found = report.rank_comparison
    if found is None:
        return []
    parts = [*_memory(found, full), *_slowest(found, full)]
    if found.groups and (full or len(report.devices) > MOST_DEVICES):
        parts.append(_groups(found))
    if full and found.steps:
        parts.append(_merged(found))
    return [Section("Ranks", tuple(parts), "ranks", "Ranks")]


def _groups(found: RankComparison) -> Table:
    rows = tuple(
        Row(
            (
                Cell(_shortened(ranges(group.ranks)), group.ranks[0] if group.ranks else -1),
                count(len(group.ranks)),
                _shortened(", ".join(group.devices)),
                size(group.highest)
                if human_bytes(group.lowest) == human_bytes(group.highest)
                else Cell(
                    f"{human_bytes(group.lowest)} to {human_bytes(group.highest)}", group.highest
                ),
                Cell("-", -1) if isinstance(group.own_ns, Unavailable) else duration(group.own_ns),
            )
        )
        for group in found.groups
    )
    columns = (
        Column("ranks", 24),
        Column("count", 6, number=True),
        Column("device", 14, gap=2),
        Column("peak", 22, number=True),
        Column("own time", 10, number=True, hint="median own time per step"),
    )
    return Table("ranks that are alike", columns, rows)


def _shortened(text: str) -> str:
    """A list of ranges, truncated if it is long: the JSON document has all of them."""
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 2]} …"


def _memory(found: RankComparison, full: bool) -> list[Part]:
    memory = found.memory
    if isinstance(memory, Unavailable):
        return [Line(memory.reason, "item", "memory")]
    worst, typical = memory.worst, memory.typical
    more = worst.bytes - typical.bytes
    if not more:
        text = f"all {found.ranks} ranks peak at {human_bytes(worst.bytes)}"
        if memory.alike < found.ranks:
            lowest = f"rank {memory.lowest.rank} peaks lowest: {human_bytes(memory.lowest.bytes)}"
            text = f"{memory.alike} of {text.removeprefix('all ')}; {lowest}"
        return [Line(text, "item")]
    text = (
        f"rank {worst.rank} peaks highest: {human_bytes(worst.bytes)} on {worst.device}"
        + (f" of {worst.hostname}" if worst.hostname != typical.hostname else "")
        + (f" in step {worst.step}" if worst.step is not None else "")
        + f", {human_bytes(more)} more than rank {typical.rank}{_median(found)}"
    )
    when = {AT_PEAK: "at the peak", AT_STEP_END: "at the end of that step"}.get(memory.at or "", "")
    parts: list[Part] = [Line(text, "item")]
    if full:
        return [*parts, _peaks(memory), *_differences(memory, when)]
    for title, rows in (("", memory.categories), ("line ", memory.lines)):
        for row in [row for row in rows if abs(row.bytes) >= more // 20][:3]:
            parts.append(
                Line(f"{human_delta(row.bytes)} {title}{named(row.key)} {when}", "item", indent=4)
            )
    return parts


def _peaks(memory: RankMemory) -> Table:
    named = (("highest", memory.worst), ("median", memory.typical), ("lowest", memory.lowest))
    rows = tuple(
        Row(
            (
                name,
                Cell(str(one.rank), one.rank),
                one.hostname,
                one.device,
                size(one.bytes),
                "-" if one.step is None else str(one.step),
                one.phase or "-",
            )
        )
        for name, one in named
    )
    columns = (
        Column("peak"),
        Column("rank", number=True),
        Column("host"),
        Column("device"),
        Column("bytes", number=True),
        Column("step", number=True),
        Column("phase"),
    )
    caption = f"peaks of ranks, of which {memory.alike} are as high as the highest"
    return Table(caption, columns, rows)


def _differences(memory: RankMemory, when: str) -> list[Part]:
    found: list[Part] = []
    for by, rows in (("category", memory.categories), ("line", memory.lines)):
        if not rows:
            continue
        cells = [Row((change(row.bytes), Cell(named(row.key), place=True))) for row in rows]
        if by == "line" and memory.more_lines_bytes:
            cells.append(Row((change(memory.more_lines_bytes), "(other lines)")))
        columns = (Column("more", number=True), Column(by))
        found.append(Table(f"what it holds more of {when}, by {by}", columns, tuple(cells)))
    return found


def _median(comparison: RankComparison) -> str:
    """What the rank is that another one is compared with; "" if it is the only other one."""
    return ", the median" if comparison.ranks > 2 else ""


def _slowest(found: RankComparison, full: bool) -> list[Part]:
    spent = found.time
    if isinstance(spent, Unavailable):
        return [Line(spent.reason, "item", "time")]
    steps = spent.steps
    parts: list[Part] = []
    if spent.stands_out:
        per_step = (spent.own_ns - spent.typical_ns) // steps
        why = ", ".join(_more(row, steps) for row in spent.phases[:3])
        text = (
            f"rank {spent.slowest} is the one the others wait for: late in "
            f"{spent.late_steps} of {plural(steps, 'step')}, with {human_ns(per_step)} more own "
            f"work per step than rank {spent.typical}{_median(found)} ({why})"
        )
        parts.append(Line(text, "item"))
    else:
        text = "no rank stands out as the slow one"
        if not spent.stable:
            text += f": rank {spent.slowest} is late in {spent.late_steps} of {steps} steps"
        parts.append(Line(text, "item"))
    if full:
        parts.append(_own_time(spent))
    return parts


def _more(row: TimeDifference, steps: int) -> str:
    sign = "+" if row.ns > 0 else "-"
    return f"{sign}{human_ns(abs(row.ns) // steps)} {row.key}"


def _own_time(spent: RankTime) -> Table:
    steps = spent.steps or 1
    rows = [
        Row((f"own time of rank {spent.slowest}", duration(spent.own_ns // steps))),
        Row((f"own time of rank {spent.typical}, the median", duration(spent.typical_ns // steps))),
        Row((f"its whole step, mean of {steps}", duration(spent.step_ns // steps))),
    ]
    rows += [
        Row((f"how late rank {spent.slowest} is, median", duration(spent.late_ns))),
        Row((f"steps in which rank {spent.slowest} is late", count(spent.late_steps))),
        Row(("lateness that chance explains", duration(spent.chance_ns))),
        Row(("cause", spent.cause or "none: no rank stands out as slow")),
    ]
    rows += [
        Row((f"more in {row.key}", Cell(_more(row, steps).split(" ")[0], row.ns)))
        for row in spent.phases
    ]
    return Table("own time per step", (Column(""), Column("per step", number=True)), tuple(rows))


def _merged(found: RankComparison) -> Table:
    rows = tuple(
        Row(
            (
                Cell(str(step.index), step.index),
                str(step.ranks),
                known_size(step.peak),
                str(step.worst_rank),
                known_size(step.median_peak),
                duration(step.own_ns),
                str(step.slowest_rank),
                duration(step.median_own_ns),
                duration(step.longest_ns),
            )
        )
        for step in found.steps[-_MOST_STEPS:]
    )
    titles = (
        "step", "ranks", "highest peak", "of rank", "median peak", "longest own time", "of rank",
        "median own time", "longest step",
    )  # fmt: skip
    columns = tuple(Column(title, number=True) for title in titles)
    caption = f"the last {len(rows)} of {len(found.steps)} steps of all {found.ranks} ranks"
    return Table(caption, columns, rows)
