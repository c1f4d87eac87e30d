"""The report as text: what the user needs first, in 80 columns.

Everything that came from elsewhere (paths,
names, messages) is made visible before it is printed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TextIO

from gpuprobe.model.report import (
    AT_NEAREST_TRACE,
    AT_STEP_END,
    CategoryTable,
    FindingRow,
    FragmentationReport,
    GrowthReport,
    LeakReport,
    OutOfMemory,
    Report,
    Suggestion,
    Table,
)
from gpuprobe.model.run.session import Step
from gpuprobe.model.text import human_bytes, human_delta, human_ns
from gpuprobe.model.values import Peak, Unavailable
from gpuprobe.reporters.terminal import Style
from gpuprobe.reporters.text import ranks as text_ranks

__all__ = [
    "fragmentation_title",
    "headline",
    "no_modules",
    "render",
    "unseen_failure",
    "when",
    "write",
]

_STATUS = {
    "complete": "complete",
    "failed": "the program failed",
    "killed": "the program was killed",
    "running": "still running",
    "unfinished": "no end on record: running, or killed",
}
_BAR = 24


def write(report: Report, stream: TextIO) -> None:
    """Write the report to ``stream``, in the characters and colours that it has."""
    style = Style.of(stream, cwd=report.session.cwd)
    stream.write("\n".join(render(report, style)) + "\n")


def render(report: Report, style: Style) -> Iterator[str]:
    """The lines of the report."""
    yield from _title(report, style)
    sections: tuple[tuple[str, Iterable[str]], ...] = (
        ("Peak", _peak(report, style)),
        (_categories_title(report.categories), _shares(report.categories, style)),
        (f"Lines {when(report)}", _shares(report.top_lines, style)),
        (f"Modules {when(report)}", _modules(report.top_modules, style)),
        ("Why it ran out of memory", _failures(report, style)),
        ("Growth", _growth(report.growth, style)),
        ("Kept from step to step", _leaks(report.leaks, style)),
        (fragmentation_title(report), _fragmentation(report.fragmentation, style)),
        ("Devices", _devices(report, style)),
        ("Steps", _steps(report, style)),
        ("Ranks", text_ranks.ranks(report, style)),
        ("Where things are", text_ranks.placement(report, style)),
        ("Non-tensor memory", text_ranks.non_tensor_memory(report, style)),
        ("Where the time goes", text_ranks.time(report, style)),
        ("Findings", _findings(report.findings, style)),
        ("What this could not see", _blind_spots(report, style)),
        ("What to try first", _advice(report.advice, style)),
    )
    for title, lines in sections:
        body = list(lines)
        if body:
            yield ""
            yield style.heading(title)
            yield from body


def headline(report: Report, style: Style) -> list[str]:
    """A few lines for the end of a run: the peak, where it was, and of what."""
    lines = [line.strip() for line in _peak(report, style)][:1]
    categories, nearest = report.categories, report.peak.nearest_trace
    rows = _largest(categories)
    if rows:
        start = "mostly"
        if nearest is not None:
            below = human_bytes(nearest.below_peak)
            start = f"in step {nearest.step}, {below} below it, mostly"
        elif isinstance(categories, CategoryTable) and categories.at == AT_STEP_END:
            start = f"at the end of step {categories.step}, mostly"
            if not isinstance(categories.total, int):
                start = f"at the end of step {categories.step}, next to what is not known:"
        lines += _of(start, rows, style)
    rows = _largest(report.top_lines)
    return lines + (_of("at", rows, style) if rows else [])


def _largest(table: Table | Unavailable) -> list[tuple[str, int]]:
    """The three largest rows, of which the unexplained rest may be one."""
    if isinstance(table, Unavailable):
        return []
    rows = [(str(row.key), row.bytes) for row in table.rows]
    at_step_end = isinstance(table, CategoryTable) and table.at == AT_STEP_END
    if at_step_end and isinstance(table.remainder.bytes, int):
        rows.append(("what no named tensor explains", table.remainder.bytes))
    return sorted((row for row in rows if row[1]), key=lambda row: -row[1])[:3]


def _of(start: str, rows: list[tuple[str, int]], style: Style) -> list[str]:
    parts = ", ".join(f"{style.path(key)} {human_bytes(count)}" for key, count in rows)
    return list(style.wrapped(f"{start} {parts}", rest="  "))


# -- title


def _title(report: Report, style: Style) -> Iterator[str]:
    recording, session = report.recording, report.session
    status = f" · {_STATUS[recording.status]}"
    name = style.fit(recording.name, style.width - len(status))
    yield style.heading(name + status)
    if session.argv:
        yield from style.wrapped(" ".join(session.argv), first="  ", rest="  ")
    environment = report.environment
    torch = environment.torch
    facts = [f"torch {torch}" if isinstance(torch, str) else "torch version not known"]
    facts.append(f"Python {environment.python}")
    facts += [", ".join(session.devices)] if session.devices else []
    facts += [f"level {session.level}"] if recording.kind == "recording" else ["snapshot"]
    facts += rank_count(report)
    duration = report.ranks[0].duration_ns
    steps = report.ranks[0].steps
    if steps:
        facts.append(f"{steps} step{'s' if steps > 1 else ''}")
    if isinstance(duration, int) and recording.kind == "recording":
        facts.append(human_ns(duration))
    yield from style.wrapped(" · ".join(facts), first="  ", rest="  ")
    error = recording.error
    if error is not None:
        where = f" (rank {error.rank})" if len(report.ranks) > 1 else ""
        text = f"{error.type}: {error.message}{where}"
        yield from style.wrapped(text, first="  ", rest="    ")


# -- peak


def _peak(report: Report, style: Style) -> Iterator[str]:
    peak = report.peak
    if peak.measure is None:
        yield from style.wrapped(
            "nothing was measured: the recording has no steps and no trace", first="  ", rest="  "
        )
        return
    resident = peak.measure == "host_rss"
    what = "resident in the process" if resident else f"allocated on {peak.device}"
    where = []
    if len(report.ranks) > 1:
        where.append(f"rank {peak.rank}")
    if peak.phase:
        where.append(f"phase {peak.phase}")
    if peak.step is not None:
        where.append(f"step {peak.step}")
    place = f", in {', '.join(where)}" if where else ""
    yield from style.wrapped(f"{_amount(peak.amount)} {what}{place}", first="  ", rest="    ")
    if not peak.certain:
        yield from style.wrapped(
            "Peaks are known only between bounds here: another step or phase may have been higher.",
            first="  ",
            rest="  ",
        )
    if isinstance(peak.before_trace, int) and peak.before_trace:
        began = "its trace began" if peak.step is None else "that step began"
        share = f"{human_bytes(peak.before_trace)} of it was alive before {began}"
        yield from style.wrapped(share, first="  ", rest="  ")
    nearest = peak.nearest_trace
    if nearest is not None and isinstance(peak.traced, Unavailable):
        text = (
            f"{peak.traced.reason}. The tables are of step {nearest.step}, the "
            f"highest with a trace: {human_bytes(nearest.below_peak)} below the peak."
        )
        yield from style.wrapped(text, first="  ", rest="    ")
    for name, value in (("reserved", peak.reserved), ("resident", peak.host_rss)):
        if isinstance(value, Peak) and not (resident and name == "resident"):
            most = f"{name}: at most {human_bytes(value.at_most)}"
            yield from style.wrapped(most, first="  ", rest="    ")
    if resident and isinstance(peak.allocated, Unavailable):
        reason = f"allocated: not known ({peak.allocated.reason})"
        yield from style.wrapped(reason, first="  ", rest="    ")


def _amount(bounds: Peak | Unavailable) -> str:
    """A peak for people: exact, or between its bounds."""
    if isinstance(bounds, Unavailable):
        return "-"
    if bounds.exact:
        return human_bytes(bounds.at_least)
    return f"{human_bytes(bounds.at_least)} to {human_bytes(bounds.at_most)}"


def _short(bounds: Peak | Unavailable) -> str:
    """A peak in a narrow column: ``≥`` where only the least is known."""
    if isinstance(bounds, Unavailable):
        return "-"
    return ("" if bounds.exact else "≥") + human_bytes(bounds.at_least)


# -- tables


def _categories_title(table: CategoryTable | Unavailable) -> str:
    if not isinstance(table, Unavailable):
        if table.at == AT_STEP_END:
            return f"Categories at the end of step {table.step}"
        if table.at == AT_NEAREST_TRACE:
            return f"Categories at the high water mark of step {table.step}"
    return "Categories at the peak"


def when(report: Report) -> str:
    """Of when the tables of lines and modules are."""
    nearest = report.peak.nearest_trace
    return "at the peak" if nearest is None else f"at the high water mark of step {nearest.step}"


def _shares(table: Table | Unavailable, style: Style) -> Iterator[str]:
    """Bytes, share, and what; with a bar where there is room. The last row is the total."""
    if isinstance(table, Unavailable):
        yield from style.wrapped(f"not known: {table.reason}", first="  ", rest="  ")
        return
    total, remainder = table.total, table.remainder
    rows = [(str(row.key), row.bytes) for row in table.rows]
    if isinstance(remainder.bytes, int) and remainder.bytes:
        rows.append((f"({remainder.what})", remainder.bytes))
    if not rows:
        yield "  nothing was allocated"
        return
    whole = total if isinstance(total, int) else sum(count for _, count in rows)
    short = all(len(key) <= 34 for key, _ in rows)
    for key, count in rows:
        share = count / whole if whole else 0.0
        percent = f"{share:6.1%}" if isinstance(total, int) else " " * 6
        start = f"  {human_bytes(count):>10} {percent}  "
        name = style.path(key)
        if short:
            bar = style.bar(share, _BAR)
            yield f"{start}{style.fit(name, 34):<34} {bar}"[: style.width].rstrip()
        else:
            yield start + style.fit(name, style.width - len(start))
    if isinstance(total, int):
        yield f"  {human_bytes(total):>10}         total"
    else:
        reason = f"the rest is not known: {total.reason}"
        yield from style.wrapped(reason, first="  ", rest="  ")


def _modules(table: Table | Unavailable, style: Style) -> Iterator[str]:
    if no_modules(table):
        yield "  not known: no module was recorded with any of it"
    else:
        yield from _shares(table, style)


def no_modules(table: Table | Unavailable) -> bool:
    """Whether all of the memory has no module."""
    rows = () if isinstance(table, Unavailable) else table.rows
    return bool(rows) and all(str(row.key).startswith("(") for row in rows)


def _growth(growth: GrowthReport | None, style: Style) -> Iterator[str]:
    if growth is None:
        return
    text = (
        f"{human_delta(growth.bytes)} from the end of step {growth.first_step} to the end "
        f"of step {growth.last_step}: {human_delta(growth.bytes_per_step)} a step"
    )
    yield from style.wrapped(text, first="  ", rest="  ")
    if growth.lines is not None:
        for row in growth.lines.rows[:3]:
            if row.bytes > 0:
                start = f"  {human_delta(row.bytes):>10}         "
                yield start + style.fit(style.path(str(row.key)), style.width - len(start))


def _failures(report: Report, style: Style) -> Iterator[str]:
    failures = report.out_of_memory
    for failure in failures[-2:]:  # a program that retries fails again and again
        for sentence in failure_sentences(report, failure):
            yield from style.wrapped(style.relative(sentence), first="  ", rest="    ")
    if any(isinstance(failure.fits_with, Unavailable) for failure in failures[-2:]):
        text = "Which other allocator settings would have fitted: gpuprobe replay --search"
        yield from style.wrapped(text, first="  ", rest="    ")
    why = unseen_failure(report)
    if why:
        yield from style.wrapped(f"not known: {why}", first="  ", rest="  ")


def failure_sentences(report: Report, failure: OutOfMemory) -> list[str]:
    """The account of a failed allocation; with its place where there are several."""
    several = len(report.ranks) > 1
    if not several and len(report.devices) < 2:
        return list(failure.sentences)
    of = f" of rank {failure.rank}" if several else ""
    return [f"On {failure.device}{of}:", *failure.sentences]


def unseen_failure(report: Report) -> str:
    """Why a run that ran out of memory has no account of it; "" where it has one, or did not."""
    error = report.recording.error
    if error is None or not error.out_of_memory or report.out_of_memory:
        return ""
    if report.session.level != "trace":
        return "needs a recording at level trace: gpuprobe run --level trace"
    mine = [row.step for row in report.steps.rows if row.rank == error.rank]
    step = mine[-1].index if mine else 0
    return (
        f"the failure is in no trace; gpuprobe run --trace-steps {step} (or all) traces the step "
        "that it was in"
    )


def _leaks(leaks: LeakReport | Unavailable, style: Style) -> Iterator[str]:
    """Only lines that keep leaving blocks behind."""
    for row in () if isinstance(leaks, Unavailable) else leaks.rows[:5]:
        start = f"  {human_bytes(row.bytes):>10}  {human_delta(row.bytes_per_step)} a step  "
        yield start + style.fit(style.path(str(row.key)), style.width - len(start))


def fragmentation_title(report: Report) -> str:
    """With the step, where it is not the peak's."""
    found = report.fragmentation
    step = None if isinstance(found, Unavailable) else found.step
    other = step is not None and step != report.peak.step
    return f"Fragmentation in step {step}" if other else "Fragmentation"


def _fragmentation(found: FragmentationReport | Unavailable, style: Style) -> Iterator[str]:
    if isinstance(found, Unavailable):
        return
    columns = ("reserved", "allocated", "rounding", "free", "largest_hole")
    yield " " * 11 + "".join(f"{name.replace('_', ' '):>13}" for name in columns)
    for name, account in (("peak", found.peak), ("end", found.end)):
        if isinstance(account, Unavailable):
            reason = f"at the {name}: not known ({account.reason})"
            yield from style.wrapped(reason, first="  ", rest="    ")
            continue
        cells = "".join(f"{human_bytes(getattr(account.total, column)):>13}" for column in columns)
        yield f"  at {name:<6}{cells}"
    for sentence in found.end.why_it_stays[:3]:
        yield from style.wrapped(style.relative(sentence), first="  ", rest="    ")


# -- devices and steps


def _devices(report: Report, style: Style) -> Iterator[str]:
    """Only where there is more than one: the peak has said it all otherwise."""
    rows = report.devices
    if len(rows) < 2:
        return
    yield f"  {'rank':>5} {'device':<9}{'peak':>12}{'reserved':>12}{'step':>7}  phase"
    for row in rows:
        step = "-" if row.step is None else row.step
        line = (
            f"  {row.rank:>5} {style.fit(row.device or '-', 9):<9}"
            f"{_short(row.peak_allocated):>12}{_short(row.peak_reserved):>12}{step:>7}  "
        )
        yield style.text(line) + style.fit(row.phase or "-", style.width - len(line))


def _steps(report: Report, style: Style) -> Iterator[str]:
    marks = report.steps.highlights
    if marks is None:
        return
    named: dict[int, list[str]] = {}
    for name in ("first", "worst", "slowest", "last"):
        named.setdefault(getattr(marks, name), []).append("at peak" if name == "worst" else name)
    resident = marks.device is None
    memory = "resident" if resident else "peak"
    yield f"  {'step':>6}{'time':>10}{memory:>12}{'at end':>12}  {'':14} longest phase"
    rows = {r.step.index: r.step for r in report.steps.rows if r.rank == marks.rank}
    for index in sorted(named):
        row = rows[index]
        device = next((d for d in row.windows if d.device == marks.device), None)
        peak = "-" if device is None else _short(device.peak_allocated)
        end = "-" if device is None else _count(device.end.allocated)
        if resident:
            peak = _short(row.host.rss_peak)
        yield style.text(
            f"  {index:>6}{human_ns(row.duration_ns):>10}{peak:>12}{end:>12}  "
            f"{', '.join(named[index]):<14} {_longest(row)}"
        )[: style.width].rstrip()


def _count(value: int | Unavailable) -> str:
    return human_bytes(value) if isinstance(value, int) else "-"


def _longest(row: Step) -> str:
    outer = [phase for phase in row.phases if "/" not in phase.path]
    if not outer or not row.duration_ns:
        return "-"
    phase = max(outer, key=lambda p: p.duration_ns)
    return f"{phase.path} {phase.duration_ns / row.duration_ns:.0%}"


# -- words


def _findings(findings: Iterable[FindingRow], style: Style) -> Iterator[str]:
    for row in findings:
        finding, location = row.finding, row.finding.location
        text = f"{finding.rule} {finding.level.value}: {finding.message}"
        if location:
            text += f" ({style.path(location.file)}:{location.line})"
        yield from style.wrapped(text, first="  ", rest="    ")


def _blind_spots(report: Report, style: Style) -> Iterator[str]:
    several = len(report.ranks) > 1
    for spot in report.blind_spots:
        text = f"{spot.what}: {spot.consequence}"
        if several and len(spot.ranks) < len(report.ranks):
            text += f" (rank {', '.join(map(str, spot.ranks))})"
        yield from style.wrapped(text, first="  - ", rest="    ")


def rank_count(report: Report) -> list[str]:
    """How many ranks are in the recording, and of how many; nothing for a program of one."""
    found, job = len(report.ranks), report.session.world_size
    if found < job:
        return [f"{found} of {job} ranks"]
    return [f"{found} ranks"] if found > 1 else []


def _advice(advice: Sequence[Suggestion], style: Style) -> Iterator[str]:
    shown = ""
    for number, item in enumerate(advice[:3], 1):
        text = style.relative(item.text)
        yield from style.wrapped(text, first=f"  {number}. ", rest="     ")
        if item.code:
            prompt = "$ " if item.code.startswith("gpuprobe ") else ""
            yield f"     {prompt}{style.text(item.code)}"
        if item.evidence != shown:
            shown = item.evidence
            why = f"because {style.relative(shown)}"
            yield from style.wrapped(why, first="     ", rest="     ")
