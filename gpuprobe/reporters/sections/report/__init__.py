"""The report of a recording as sections, in the order in which they are read."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace

from gpuprobe.model.causes import MemoryCause
from gpuprobe.model.findings import Finding, Level
from gpuprobe.model.report import AT_STEP_END, CategoryTable, Report
from gpuprobe.model.text import human_bytes, human_ns, plural, ranges
from gpuprobe.model.values import Unavailable
from gpuprobe.reporters.sections.causes import cause_parts
from gpuprobe.reporters.sections.parts import (
    Code,
    Facts,
    Line,
    Part,
    Section,
    SourceExcerpt,
    bulleted,
    named,
)
from gpuprobe.reporters.sections.report.failures import (
    ended_out_of_memory,
    failure_sections,
)
from gpuprobe.reporters.sections.report.head import (
    head_section,
    main_cause,
    status_text,
)
from gpuprobe.reporters.sections.report.memory import (
    fragmentation_sections,
    growth_sections,
    largest_rows,
    non_tensor_sections,
    peak_section,
    share_sections,
)
from gpuprobe.reporters.sections.report.needs import needs_section
from gpuprobe.reporters.sections.report.ranks import (
    child_sections,
    comparison_sections,
    placement_sections,
    process_sections,
)
from gpuprobe.reporters.sections.report.steps import (
    communication_sections,
    device_sections,
    launch_sections,
    step_sections,
    time_sections,
)
from gpuprobe.reporters.sections.step_time import step_time_sections
from gpuprobe.step_time.recorded import NO_WORK

_FEW_ADVICE = 3
_FEW_CAUSES = 2
_FEW_MISSING = 3

_MOST_LINES = 20
"""The most findings, and blind spots, in a short report: each of many ranks can have its own."""

MOST_FINDINGS = 1000
"""The most findings that are shown: a program may have one in each step."""

_MOST_ROWS = 1_000
"""The most rows of a table."""

_MOST_RELATED = 100
"""The most places of one finding."""

_MOST_RANKS = 1_000
"""The most ranks that a line lists, as ranges."""


def report_sections(
    report: Report, *, full: bool = False, problems: Sequence[str] = (), top: int = _MOST_ROWS
) -> list[Section]:
    """The whole report. ``full``: every figure, not only the most important ones; ``problems``:
    further blind spots, such as traces that cannot be read; ``top``: rows of the tables of lines
    and modules of the peak, in which rows that repeat are one.
    """
    peak, why = peak_section(report, full=full), failure_sections(report, full=full)
    return [
        head_section(report),
        _title(report, full=full),
        *((*why, peak) if ended_out_of_memory(report) else (peak, *why)),
        *_causes(report, full=full),
        *_advice(report, full=full),
        *needs_section(report, full=full),
        *share_sections(report, top),
        *growth_sections(report, full=full),
        *fragmentation_sections(report, full=full),
        *device_sections(report, full=full),
        *step_sections(report, full=full),
        *comparison_sections(report, full=full),
        *child_sections(report, full=full),
        *placement_sections(report, full=full),
        *non_tensor_sections(report, full=full),
        *time_sections(report, full=full),
        *communication_sections(report, full=full),
        *(launch_sections(report) if full else ()),
        *_step_time(report, full=full),
        *_compiled(report, full=full),
        *(process_sections(report) if full else ()),
        *_findings(report, full=full),
        *_blind_spots(report, problems, full=full),
        *_environment(report, full=full),
    ]


def _step_time(report: Report, *, full: bool) -> list[Section]:
    """The predicted time, where the work of steps was recorded."""
    if report.step_time is NO_WORK:
        return []
    top = _MOST_ROWS if full else _FEW_TIMES
    ranks = report.session.world_size
    return step_time_sections(report.step_time, top, full=full, ranks=ranks)


_FEW_TIMES = 5


def _compiled(report: Report, *, full: bool) -> list[Section]:
    """The compilations of torch.compile, graph breaks and recompilations first, each once."""
    if not report.compiled:
        return []
    texts = sorted(report.compiled, key=lambda text: " graph: " in text)
    shown = texts if full or len(texts) <= _MOST_LINES else texts[:_MOST_LINES]
    more = [f"({len(texts) - len(shown)} more)"] if len(texts) > len(shown) else []
    return [Section("Compiled", bulleted([*shown, *more]), "compiled", "Compiled")]


# -- what was recorded


def facts(report: Report) -> list[str]:
    """The recording in a few words: versions, devices, level, ranks and steps."""
    recording, session, first = report.recording, report.session, report.ranks[0]
    torch = report.environment.torch
    found = [f"torch {torch}" if isinstance(torch, str) else "torch version unknown"]
    found.append(f"Python {report.environment.python}")
    found += [_devices(report)] if session.devices else []
    recorded = recording.kind == "recording"
    found.append(f"level {session.level}" if recorded else "snapshot")
    ranks, job = len(report.ranks), session.world_size
    if ranks < job:
        found.append(f"{ranks} of {job} ranks")
    elif ranks > 1:
        found.append(f"{ranks} ranks")
    if first.steps:
        found.append(plural(first.steps, "step"))
    if recorded and not isinstance(first.duration_ns, Unavailable):
        found.append(human_ns(first.duration_ns))
    return found


def _devices(report: Report) -> str:
    """The recorded devices, with the names of the GPUs."""
    devices, names = ", ".join(report.session.devices), ", ".join(dict.fromkeys(report.gpus))
    return f"{devices} ({names})" if names else devices


def outcome(report: Report) -> str:
    """How the run ended, in a few words."""
    return "out of memory" if ended_out_of_memory(report) else status_text(report)


_ADVICE_OF_TORCH = " If reserved but unallocated memory is large try setting "
"""In torch's message for any lack of memory; the section about the failure replaces it."""


def _title(report: Report, *, full: bool) -> Section:
    recording = report.recording
    parts = [Line(f"{recording.name} · {outcome(report)}", "heading")]
    if report.session.argv:
        parts.append(Line(" ".join(report.session.argv)))
    parts.append(Line(" · ".join(facts(report))))
    error = recording.error
    if error is not None:
        where = f" (rank {error.rank})" if len(report.ranks) > 1 else ""
        if error.out_of_memory and not full:
            error = replace(error, message=error.message.partition(_ADVICE_OF_TORCH)[0])
        parts.append(Line(f"{error.located}{where}", "item", error.type))
    missing = recording.missing if full else recording.missing[:_FEW_MISSING]
    parts += [Line(text, "item", "not recorded") for text in missing]
    level = None if error is None else Level.ERROR
    return Section("", tuple(parts), "recording", level=level)


def _environment(report: Report, *, full: bool) -> list[Section]:
    """The environment and session of the recording."""
    if not full:
        return []
    rows = []
    recording = report.recording
    version = ".".join(map(str, recording.format_version))
    rows.append(("recording", f"{recording.path} ({recording.kind}, format {version})"))
    for group in (report.environment, report.session):
        for one in fields(group):
            value = getattr(group, one.name)
            if isinstance(value, Unavailable):
                shown = f"unknown: {value.reason}"
            elif one.name in _NEVER_ZERO and not value:
                shown = "unknown"
            elif one.name == "total_memory":
                shown = human_bytes(value)
            elif one.name == "started_at":
                shown = _time_of(value)
            elif isinstance(value, tuple):
                shown = " ".join(value)
            else:
                shown = str(value)
            rows.append((one.name.replace("_", " "), shown or "-"))
    return [Section("Environment", (Facts(tuple(rows)),), "environment", "Environment")]


_NEVER_ZERO = ("cpu_count", "pid", "started_at")
"""Fields that a snapshot does not contain and that are 0 there."""


def _time_of(seconds: float) -> str:
    """A time in UTC: readers may be in another time zone."""
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds))
    except (OverflowError, ValueError, OSError):  # a damaged recording
        return str(seconds)


# -- the end of a run


def headline(report: Report) -> Section:
    """A few lines for the end of a run: the peak, its place and largest rows."""
    sentence = next(part for part in peak_section(report).parts if isinstance(part, Line))
    parts = [Line(sentence.whole, "item", indent=0)]
    categories, nearest = report.categories, report.peak.nearest_trace
    rows = largest_rows(categories)
    if rows and isinstance(categories, CategoryTable):
        start = "mostly"
        if nearest is not None:
            below = human_bytes(nearest.below_peak)
            start = f"in step {nearest.step}, {below} below it, mostly"
        elif categories.at == AT_STEP_END:
            start = f"at the end of step {categories.step}, mostly"
            if isinstance(categories.total, Unavailable):
                start = f"at the end of step {categories.step}, apart from unknown memory:"
        parts.append(_of(start, rows))
    rows = largest_rows(report.top_lines)
    return Section(parts=(*parts, *([_of("at", rows)] if rows else [])))


def _of(start: str, rows: Sequence[tuple[str, int]]) -> Line:
    listed = ", ".join(f"{key} {human_bytes(number)}" for key, number in rows)
    return Line(f"{start} {listed}", "item", indent=0)


# -- words


def _findings(report: Report, *, full: bool) -> list[Section]:
    """Findings in the recording, such as modules on another device."""
    parts: list[Part] = []
    short: dict[tuple[str, str, Level], list[int]] = {}
    for row in report.findings[: MOST_FINDINGS if full else None]:
        found = row.finding
        of = f" of rank {row.rank}" if full and len(report.ranks) > 1 else ""
        text = found.message
        if found.location is not None:
            text += f" ({found.location.file}:{found.location.line})"
        label = f"{found.rule} {found.level.value}{of}"
        if full:
            parts.append(Section(f"{label}: {text}", tuple(_about(found)), level=found.level))
        else:
            short.setdefault((label, text, found.level), []).append(row.rank)
    for (label, text, level), ranks in [*short.items()][:_MOST_LINES]:
        parts.append(Line(text + _of_ranks(report, ranks), "item", label, level=level))
    if len(short) > _MOST_LINES:
        parts.append(Line(f"… {len(short) - _MOST_LINES} more: -v lists them"))
    if full and len(report.findings) > MOST_FINDINGS:
        parts.append(Line(f"… {len(report.findings) - MOST_FINDINGS} more: --json lists them"))
    return [Section("Findings", tuple(parts), "findings", "Findings")] if parts else []


def _about(found: Finding) -> Iterator[Part]:
    yield Facts((
        ("kind", found.kind),
        *([("about", found.subject)] if found.subject else []),
        *([("times", str(found.count))] if found.count > 1 else []),
        *found.evidence,
    ))  # fmt: skip
    related = found.related[:_MOST_RELATED]
    for place in (*related, *([found.location] if found.location is not None else [])):
        yield Line(str(place), place=True)
        yield SourceExcerpt(place)
    if len(found.related) > len(related):
        yield Line(
            f"… {plural(len(found.related) - len(related), 'more place')}: --json lists them"
        )
    if found.fix is not None:
        yield Line(found.fix.text, label="fix")
        yield Code(found.fix.code)
        if found.fix.diff:
            yield Code(found.fix.diff, indent=0)  # as git apply accepts it


def _of_ranks(report: Report, ranks: Sequence[int]) -> str:
    """The ranks to which something applies; "" for all."""
    which = sorted(set(ranks))
    if len(which) >= len(report.ranks):
        return ""
    listed = ranges(which[:_MOST_RANKS])
    more = f" and {len(which) - _MOST_RANKS} more" if len(which) > _MOST_RANKS else ""
    return f" (rank{'s' if len(which) > 1 else ''} {listed}{more})"


def _blind_spots(report: Report, problems: Sequence[str], *, full: bool) -> list[Section]:
    """Memory and time that the figures do not include."""
    texts = [
        f"{spot.what}: {spot.consequence}{_of_ranks(report, spot.ranks)}"
        for spot in report.blind_spots
    ]
    if not full and len(texts) > _MOST_LINES:
        texts[_MOST_LINES:] = [f"… {len(texts) - _MOST_LINES} more: -v lists them"]
    lines = bulleted((*texts, *problems))
    return [Section("Blind spots", lines, "not-seen", "Blind spots")] if lines else []


def _causes(report: Report, *, full: bool) -> list[Section]:
    """The causes after the first, which is in the head; ``full``: all of them."""
    if isinstance(report.causes, Unavailable):
        return []
    parts: list[Part] = []
    first = main_cause(report)
    others = [cause for cause in report.causes if cause is not first]
    for cause in report.causes if full else others[:_FEW_CAUSES]:
        parts += cause_parts(cause)
        if full:
            parts.append(Facts(tuple(_about_cause(cause))))
    more = len(others) - _FEW_CAUSES
    if more > 0 and not full:
        parts.append(Line(f"… {more} more: -v shows them"))
    title = "Causes"
    if first is not None and not full:
        title = "More causes"
    return [Section(title, tuple(parts), "causes", "Causes")] if parts else []


def _about_cause(cause: MemoryCause) -> Iterator[tuple[str, str]]:
    yield "rule", cause.rule
    yield "memory", f"{human_bytes(cause.bytes)} in {plural(cause.blocks, 'block')}"
    yield "allocated at", named(cause.made_at)
    if cause.last_use is not None:
        yield "last used at", named(cause.last_use)
    if cause.holder is not None:
        yield "held by", cause.holder.text
    if cause.kept_at is not None:
        yield "stored at", str(cause.kept_at)


def _advice(report: Report, *, full: bool) -> list[Section]:
    """Advice, the most memory first; shared evidence appears once."""
    title, name, short = "What to try for the rest", "advice", "Try"
    if main_cause(report) is None:
        title = "What to try first"
    parts: list[Part] = []
    before = ""
    for item in report.advice[: None if full else _FEW_ADVICE]:
        parts.append(Line(item.text, "numbered"))
        if item.code:
            prompt = "$ " if item.code.startswith("gpuprobe ") else ""
            parts.append(Code(f"{prompt}{item.code}"))
        evidence = f"because {item.evidence}" if item.evidence != before else ""
        if full:
            about = f"{item.id}, about {human_bytes(item.bytes)}"
            evidence = f"{evidence} ({about})" if evidence else about
        if evidence:
            parts.append(Line(evidence, indent=5))
        parts.append(Line(f"saves {item.saves}" if item.saves else "not tried", indent=5))
        before = item.evidence
    if not parts and full:
        parts.append(Line("No suggestions: no rule found enough evidence."))
    return [Section(title, tuple(parts), name, short)] if parts else []
