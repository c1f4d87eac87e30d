"""The sections of the HTML report, from the report alone."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import fields
from typing import cast

from gpuprobe.model.place import NoPlace
from gpuprobe.model.report import (
    AT_STEP_END,
    CategoryTable,
    FragmentationReport,
    Highlights,
    Layout,
    LeakReport,
    Report,
    Row,
    StepRow,
    Table,
)
from gpuprobe.model.run.session import DeviceWindow
from gpuprobe.model.text import human_bytes, human_delta, human_ns
from gpuprobe.model.values import Peak, Unavailable
from gpuprobe.reporters.html.markup import Markup, Part, el
from gpuprobe.reporters.html.parts import (
    Column,
    amount,
    bar,
    listed,
    place,
    plural,
    section,
    size,
    table,
    unknown,
)
from gpuprobe.reporters.terminal import Style
from gpuprobe.reporters.text.report import (
    failure_sentences,
    fragmentation_title,
    no_modules,
    rank_count,
    unseen_failure,
    when,
)

__all__ = [
    "answer",
    "environment",
    "facts",
    "failures",
    "findings",
    "fragmentation",
    "growth",
    "lines",
    "modules",
    "ranks",
    "steps",
    "unseen",
]

STEP_ROWS = 200

_STATUS = {
    "complete": "complete",
    "failed": "the program failed",
    "killed": "the program was killed",
    "running": "still running",
    "unfinished": "no end on record: running, or killed",
}


def facts(report: Report) -> list[str]:
    """What was recorded, and how, in a few words."""
    recording, session, env = report.recording, report.session, report.environment
    found = [_STATUS[recording.status]]
    if isinstance(env.torch, str):
        found.append(f"torch {env.torch}")
    if session.devices:
        found.append(", ".join(session.devices))
    found.append("snapshot" if recording.kind == "snapshot" else f"level {session.level}")
    found += rank_count(report)
    if report.ranks[0].steps:
        found.append(plural(report.ranks[0].steps, "step"))
    duration = report.ranks[0].duration_ns
    if isinstance(duration, int) and recording.kind == "recording":
        found.append(human_ns(duration))
    return found


# -- the answer


def answer(report: Report) -> Markup:
    """The first thing to read: the peak, where it was, what it was, and what to try."""
    return el(
        "section",
        _error(report),
        el("div", _headline(report), _causes(report), _advice(report), class_="cards"),
        _tiles(report),
        id="answer",
        aria_label="the answer",
    )


def _error(report: Report) -> Markup | None:
    error = report.recording.error
    if error is None:
        return None
    return el("p", el("b", error.type), f": {error.message}", class_="banner")


def _headline(report: Report) -> Markup:
    peak = report.peak
    if peak.measure is None:
        return el("div", el("h2", "Peak"), el("p", "Nothing was measured."), class_="card")
    resident = peak.measure == "host_rss"
    where = []
    if len(report.ranks) > 1:
        where.append(f"rank {peak.rank}")
    if peak.phase:
        where.append(f"phase {peak.phase}")
    if peak.step is not None:
        where.append(f"step {peak.step}")
    notes: list[Part] = []
    before = peak.before_trace
    if isinstance(before, int) and before:
        began = "the trace" if peak.step is None else "that step"
        notes.append(el("p", f"{human_bytes(before)} of it was there before {began} began."))
    nearest = peak.nearest_trace
    if nearest is not None and isinstance(peak.traced, Unavailable):
        of = f"step {nearest.step}, the highest with a trace"
        below = f"{human_bytes(nearest.below_peak)} below the peak"
        notes.append(el("p", f"{peak.traced.reason}. The tables are of {of}: {below}."))
    if not peak.certain:
        notes.append(
            el("p", "Known only between bounds: another step or phase may have been higher.")
        )
    return el(
        "div",
        el("h2", "Peak memory"),
        el("p", amount(peak.amount), class_="big"),
        el("p", "resident in the process" if resident else f"allocated on {peak.device}"),
        el("p", "in ", el("b", ", ".join(where))) if where else None,
        notes,
        class_="card",
    )


def _causes(report: Report) -> Markup:
    """The three lines with the most memory at the peak, and the rest; categories where no line
    is known.
    """
    cwd = report.session.cwd
    for found in (report.top_lines, report.categories):
        if isinstance(found, Unavailable):
            continue
        rows = [r for r in found.rows if r.bytes and not isinstance(r.key, NoPlace)]
        total = found.total
        if rows:
            items = []
            for row in rows[:3]:
                share = row.bytes / total if isinstance(total, int) and total else None
                items.append(
                    el(
                        "li",
                        el(
                            "span",
                            el("b", human_bytes(row.bytes)),
                            f" {share:.0%}" if share is not None else None,
                            class_="much",
                        ),
                        place(str(row.key), cwd),
                        bar(share) if share is not None else None,
                    )
                )
            title, nearest = "Biggest causes", report.peak.nearest_trace
            if nearest is not None:
                title += f" in step {nearest.step}"
            elif isinstance(found, CategoryTable) and found.at == AT_STEP_END:
                title = f"Biggest at the end of step {found.step}"
            rest = total - sum(row.bytes for row in rows[:3]) if isinstance(total, int) else 0
            return el(
                "div",
                el("h2", title),
                el("ol", items, class_="causes"),
                el("p", f"All else: {human_bytes(rest)}, {rest / total:.0%}")
                if isinstance(total, int) and rest > 0
                else None,
                el("p", "The rest is not known.") if isinstance(total, Unavailable) else None,
                class_="card",
            )
    why = "no line of yours is on any stack"
    if isinstance(report.top_lines, Unavailable):
        why = report.top_lines.reason
    return el("div", el("h2", "Biggest causes"), el("p", f"Not known: {why}"), class_="card")


def _advice(report: Report) -> Markup:
    advice = report.advice
    if not advice:
        text = "No rule found enough evidence for a suggestion."
        return el("div", el("h2", "Try first"), el("p", text), class_="card")
    first, *others = advice
    relative = Style(cwd=report.session.cwd).relative
    more = [
        el(
            "li",
            relative(item.text),
            _code(item.code),
            el("p", relative(item.evidence), class_="note"),
        )
        for item in others[:4]
    ]
    return el(
        "div",
        el("h2", "Try first"),
        el("p", relative(first.text), class_="advice"),
        _code(first.code),
        el("p", "Because ", relative(first.evidence), ".", class_="note"),
        el("details", el("summary", plural(len(more), "more suggestion")), el("ul", more))
        if more
        else None,
        class_="card",
    )


def _code(text: str) -> Markup | None:
    return el("pre", el("code", text)) if text else None


def _tiles(report: Report) -> Markup:
    tiles: list[tuple[str, str]] = []
    peak = report.peak
    if isinstance(peak.reserved, Peak):
        tiles.append(("peak reserved", amount(peak.reserved)))
    found = report.fragmentation
    if isinstance(found, FragmentationReport) and isinstance(found.peak, Layout):
        of = "at the peak" if found.step in (None, peak.step) else f"in step {found.step}"
        tiles.append((f"reserved, unused {of}", human_bytes(found.peak.total.free)))
    place_of = (peak.rank, peak.device)
    device = next((d for d in report.devices if (d.rank, d.device) == place_of), None)
    if device is not None and isinstance(device.end.allocated, int):
        tiles.append(("allocated at the end", human_bytes(device.end.allocated)))
    if report.growth is not None:
        tiles.append(("growth a step", human_delta(report.growth.bytes_per_step)))
    if isinstance(peak.host_rss, Peak) and peak.measure != "host_rss":
        tiles.append(("peak resident on the host", amount(peak.host_rss)))
    if report.out_of_memory:
        tiles.append(("out of memory", plural(len(report.out_of_memory), "time")))
    if not tiles:
        return Markup("")
    cells = [el("div", el("dt", name), el("dd", value)) for name, value in tiles]
    return el("dl", cells, class_="tiles")


# -- tables


def _share_columns(total: int) -> list[Column]:
    def share(row: Row) -> tuple[Part, float]:
        part = row.bytes / total if total else 0.0
        return [el("span", f"{part:.1%}"), bar(part)], part

    return [
        Column("bytes", lambda row: size(row.bytes)),
        Column("share", share),
        Column("blocks", lambda row: (f"{row.blocks:,}", row.blocks)),
    ]


def _share_table(found: Table | Unavailable, what: str, name: Column, identifier: str) -> Markup:
    if isinstance(found, Unavailable):
        return unknown(found)
    rest = found.remainder
    total = cast(int, found.total)  # lines and modules are of a trace
    foot: list[Part] = [human_bytes(total), "100%", "", "total"]
    note = None
    if isinstance(rest.bytes, int) and rest.bytes:
        note = el("p", f"{rest.what} not listed: {human_bytes(rest.bytes)}", class_="note")
    shown = table(
        [*_share_columns(total), name],
        found.rows,
        caption=what,
        foot=foot,
        find=True,
        name=identifier,
    )
    return Markup(shown + (note or ""))


def lines(report: Report) -> Markup:
    """Every line of the user's code that had memory at the peak."""
    cwd = report.session.cwd
    name = Column("line", lambda row: (place(str(row.key), cwd), str(row.key)), number=False)
    return section(
        "lines",
        f"Lines {when(report)}",
        _share_table(report.top_lines, f"lines {when(report)}", name, "lines-table"),
        short="Lines",
        note="By the innermost line of your own code on the stack of each allocation.",
    )


def modules(report: Report) -> Markup:
    """Every module that had memory at the peak."""
    found = report.top_modules
    if no_modules(found):
        why = Unavailable("no module was recorded with any of it")
        return section("modules", f"Modules {when(report)}", unknown(why))
    name = Column("module", lambda row: (el("b", row.key), row.key), number=False)
    return section(
        "modules",
        f"Modules {when(report)}",
        _share_table(found, f"modules {when(report)}", name, "modules-table"),
        short="Modules",
        note="By the module that was running when the memory was allocated.",
    )


def growth(report: Report) -> Markup:
    """What grows from step to step, and which lines leave blocks behind."""
    found, leaks = report.growth, report.leaks
    cwd = report.session.cwd
    parts: list[Part] = []
    if found is not None:
        text = (
            f"{human_delta(found.bytes)} from the end of step {found.first_step} to the end "
            f"of step {found.last_step}: {human_delta(found.bytes_per_step)} a step."
        )
        parts.append(el("p", text))
    if isinstance(leaks, LeakReport) and leaks.rows:
        columns = [
            Column("bytes", lambda row: size(row.bytes)),
            Column("a step", lambda row: size(row.bytes_per_step)),
            Column("blocks", lambda row: (f"{row.blocks:,}", row.blocks)),
            Column("line", lambda row: (place(str(row.key), cwd), str(row.key)), number=False),
        ]
        parts.append(table(columns, leaks.rows, caption="lines that leave blocks behind"))
    return section("growth", "Growth", parts)


def failures(report: Report) -> Markup:
    """Why an allocation failed."""
    cwd = report.session.cwd.rstrip("/\\")
    parts = []
    for failure in report.out_of_memory[-3:]:
        sentences = failure_sentences(report, failure)
        if cwd:
            sentences = [text.replace(cwd + "/", "") for text in sentences]
        parts.append(el("div", [el("p", text) for text in sentences], class_="card"))
    why = unseen_failure(report)
    if why:
        parts.append(el("p", f"Not known: {why}."))
    return section("out-of-memory", "Why it ran out of memory", parts, short="Out of memory")


def fragmentation(report: Report) -> Markup:
    """How reserved memory was cut up, at the peak and at the end."""
    found = report.fragmentation
    if isinstance(found, Unavailable):
        return Markup("")
    names = ("reserved", "allocated", "rounding", "pending", "free", "largest_hole", "pinned")
    rows, notes = [], []
    for when_, account in (("peak", found.peak), ("end", found.end)):
        if isinstance(account, Unavailable):
            notes.append(el("p", f"At the {when_}: not known ({account.reason})."))
        else:
            rows.append((when_, account.total))

    def column(name: str) -> Column:
        return Column(name.replace("_", " "), lambda row: size(getattr(row[1], name)))

    columns = [
        Column("at the", lambda row: (row[0], row[0]), number=False),
        *(column(name) for name in names),
    ]
    why = found.end.why_it_stays[:3]
    return section(
        "fragmentation",
        fragmentation_title(report),
        table(columns, rows, caption="how reserved memory was used") if rows else None,
        notes,
        [el("p", text) for text in why],
        note="allocated + pending + free = reserved; rounding is inside allocated. Pinned: free, "
        "but in segments that also hold blocks in use, so it cannot go back to the driver.",
    )


# -- steps and ranks


def _chosen(rows: Sequence[StepRow], marks: Highlights | None) -> Sequence[StepRow]:
    if len(rows) <= STEP_ROWS:
        return rows
    half = STEP_ROWS // 2
    wanted = {id(row) for row in (*rows[:half], *rows[-half:])}
    if marks is not None:
        special = {marks.first, marks.worst, marks.last, marks.slowest}
        wanted |= {id(row) for row in rows if row.step.index in special and row.rank == marks.rank}
    return [row for row in rows if id(row) in wanted]


def _device_of_rank(report: Report) -> dict[int, str]:
    """By rank, the device whose steps are shown: that of the peak; of other ranks, the one where
    theirs is. Each rank may have a GPU of its own.
    """
    highest: dict[int, tuple[int, str]] = {}
    for row in report.devices:
        peak = row.peak_allocated
        amount_ = -1 if isinstance(peak, Unavailable) else peak.at_least
        if row.device and amount_ > highest.get(row.rank, (-2, ""))[0]:
            highest[row.rank] = (amount_, row.device)
    found = {rank: device for rank, (_, device) in highest.items()}
    marks = report.steps.highlights
    if marks is not None and marks.device is not None:
        found[marks.rank] = marks.device
    return found


def steps(report: Report) -> Markup:
    """A row per step; where there are very many, the first, the last and the telling ones."""
    rows = report.steps.rows
    if not rows:
        return Markup("")
    marks = report.steps.highlights
    several = len(report.ranks) > 1
    device = None if marks is None else marks.device
    named: dict[tuple[int, int], list[str]] = {}
    if marks is not None:
        for name in ("first", "worst", "slowest", "last"):
            key = (marks.rank, getattr(marks, name))
            named.setdefault(key, []).append("peak" if name == "worst" else name)

    devices = _device_of_rank(report)

    def window(row: StepRow) -> DeviceWindow | None:
        return next((d for d in row.step.windows if d.device == devices.get(row.rank)), None)

    def peak(row: StepRow) -> tuple[Part, int]:
        found = window(row)
        if device is None:
            return _bounds(row.step.host.rss_peak)
        return ("-", -1) if found is None else _bounds(found.peak_allocated)

    def reserved(row: StepRow) -> tuple[Part, int]:
        found = window(row)
        return ("-", -1) if found is None else _bounds(found.peak_reserved)

    def end(row: StepRow) -> tuple[Part, int]:
        found = window(row)
        value = None if found is None else found.end.allocated
        return size(value) if isinstance(value, int) else ("-", -1)

    def longest(row: StepRow) -> tuple[Part, str]:
        outer = [phase for phase in row.step.phases if "/" not in phase.path]
        if not outer or not row.step.duration_ns:
            return "-", ""
        phase = max(outer, key=lambda p: p.duration_ns)
        text = f"{phase.path} {phase.duration_ns / row.step.duration_ns:.0%}"
        return text, text

    def what(row: StepRow) -> tuple[Part, str]:
        text = ", ".join(named.get((row.rank, row.step.index), ()))
        return el("b", text) if text else "", text

    columns = [
        Column("step", lambda row: (str(row.step.index), row.step.index)),
        *([Column("rank", lambda row: (str(row.rank), row.rank))] if several else []),
        *(
            [Column("device", lambda row: (devices.get(row.rank, "-"),) * 2, number=False)]
            if len(set(devices.values())) > 1
            else []
        ),
        Column("time", lambda row: (human_ns(row.step.duration_ns), row.step.duration_ns)),
        Column("resident" if device is None else "peak allocated", peak),
        *([] if device is None else [Column("peak reserved", reserved)]),
        *([] if device is None else [Column("allocated at end", end)]),
        Column("longest phase", longest, number=False),
        Column("", what, number=False),
    ]
    chosen = _chosen(rows, marks)
    less = None
    if len(chosen) < len(rows):
        less = f"{len(chosen)} of {len(rows)} steps are listed; the chart has all of them."
    chart = el("div", class_="chart", data_chart="steps") if len(rows) > 2 and device else None
    return section("steps", "Steps", chart, table(columns, chosen, caption="steps"), note=less)


def _bounds(bounds: Peak | Unavailable) -> tuple[Part, int]:
    if isinstance(bounds, Unavailable):
        return el("span", "-", title=bounds.reason), -1
    sign = "" if bounds.exact else "≥ "
    at_least = bounds.at_least
    title = f"{at_least:,} B" + ("" if bounds.exact else f" to {bounds.at_most:,} B")
    return el("span", sign + human_bytes(at_least), title=title), at_least


def ranks(report: Report) -> Markup:
    """The peak of each rank and device, where there are several."""
    rows = report.devices
    if len(rows) < 2:
        return Markup("")
    columns = [
        Column("rank", lambda row: (str(row.rank), row.rank)),
        Column("device", lambda row: (row.device or "-", row.device or ""), number=False),
        Column("peak allocated", lambda row: _bounds(row.peak_allocated)),
        Column("peak reserved", lambda row: _bounds(row.peak_reserved)),
        Column("step", lambda row: _optional(row.step)),
        Column("phase", lambda row: (row.phase or "-", row.phase or ""), number=False),
    ]
    return section(
        "ranks",
        "Ranks and devices",
        table(columns, rows, caption="ranks and devices"),
        short="Ranks",
    )


def _optional(value: int | None) -> tuple[Part, int]:
    return ("-", -1) if value is None else (str(value), value)


# -- words


def findings(report: Report) -> Markup:
    """Findings of the recording itself, such as modules on another device."""
    cwd = report.session.cwd
    parts = []
    for row in report.findings:
        item, spot = row.finding, row.finding.location
        parts.append(
            el(
                "div",
                el("p", el("b", f"{item.rule} {item.level.value}"), " ", item.message),
                place(f"{spot.file}:{spot.line}", cwd) if spot else None,
                class_=f"card {item.level.value}",
            )
        )
    return section("findings", "Findings", parts)


def unseen(spots: Iterable[tuple[str, str]]) -> Markup:
    """What the numbers do not include."""
    items: list[Part] = [
        [el("b", what), f": {consequence}"] if consequence else what for what, consequence in spots
    ]
    return section("unseen", "What this could not see", listed(items), short="Not seen")


def _time_of(seconds: float) -> str:
    """A moment in words, in UTC: the page is read elsewhere."""
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds))
    except (OverflowError, ValueError, OSError):  # a damaged recording
        return str(seconds)


def environment(report: Report) -> Markup:
    """Where it was recorded."""
    rows = []
    for group in (report.environment, report.session):
        for field in fields(group):
            name, value = field.name, getattr(group, field.name)
            if isinstance(value, Unavailable):
                shown: Part = el("span", f"not known: {value.reason}", class_="unknown")
            elif name == "total_memory":
                shown = human_bytes(value)
            elif name == "started_at":
                shown = _time_of(value)
            elif isinstance(value, tuple):
                shown = " ".join(map(str, value)) or "-"
            else:
                shown = str(value) if value != "" else "-"
            rows.append(el("tr", el("th", name.replace("_", " "), scope="row"), el("td", shown)))
    body = el("table", el("caption", "environment"), el("tbody", rows), class_="facts")
    return section("environment", "Environment", el("div", body, class_="scroll"))
