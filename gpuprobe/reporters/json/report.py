"""The report as JSON: the document ``gpuprobe.report``.

An object has its dataclass's fields, all of them, under their names; the shapes below list
the few that differ. A row for a line of code has ``key`` (its text) and ``file``, ``line`` and
``function``, which are null if the line is unknown. An unknown value is
``{"unavailable": reason, "status": …}``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import Annotated, Any, Final

from gpuprobe.model.causes import Explanation, MemoryCause
from gpuprobe.model.findings import Finding
from gpuprobe.model.io.encoder import FINDING, Each, keys
from gpuprobe.model.memory import AllocatorCounts
from gpuprobe.model.needs import NeedRow
from gpuprobe.model.place import NoPlace, Place
from gpuprobe.model.record import record
from gpuprobe.model.report import (
    CategoryTable,
    FindingRow,
    GrowthReport,
    Key,
    LeakRow,
    Moment,
    OutOfMemory,
    PinRow,
    RankError,
    RankMemory,
    RankTime,
    Remainder,
    Report,
    ShareRow,
    ShareTable,
    TimeShares,
)
from gpuprobe.model.run.communication import Transfer
from gpuprobe.model.run.launches import LaunchRow
from gpuprobe.model.run.recording import StepRow, StepRows
from gpuprobe.model.run.session import DeviceWindow, Phase, Step
from gpuprobe.model.values import Peak, Unavailable
from gpuprobe.reporters.json.documents import Document
from gpuprobe.reporters.sections.report.head import head_of


@record(frozen=True)
class CodeLine:
    """A line of code: its text, and its file, number and function, null if unknown."""

    key: str
    file: str | None
    line: int | None
    function: str | None


@record(frozen=True)
class CodeLineShare:
    """A line's part of an amount of memory. blocks is null where only bytes were counted."""

    key: CodeLine
    bytes: int
    blocks: int | None


@record(frozen=True)
class NamedShare:
    """A part of an amount of memory. blocks is null where only bytes were counted."""

    key: str
    bytes: int
    blocks: int | None


@record(frozen=True)
class LineTable:
    """Lines, most bytes first; rows and remainder sum to the total."""

    total: int | Unavailable
    rows: tuple[CodeLineShare, ...]
    remainder: Remainder


@record(frozen=True)
class NamedTable:
    """Rows, most bytes first; rows and remainder sum to the total."""

    total: int | Unavailable
    rows: tuple[NamedShare, ...]
    remainder: Remainder


@record(frozen=True)
class Categories(NamedTable):
    """Shares by category at one moment: the peak, the high water mark of the nearest step that has
    a trace, or (for tensors with a name only) the end of a step.
    """

    at: Moment
    step: int | None


@record(frozen=True)
class LineDifference:
    """What one rank has more of than another, negative where it has less."""

    key: CodeLine
    bytes: int


@record(frozen=True)
class NamedDifference:
    """What one rank has more of than another, negative where it has less."""

    key: str
    bytes: int


@record(frozen=True)
class LineNeed:
    """The blocks in one state that a line of the program made; last_use is the line of their last
    use in the step of the trace, null where they have none in it.
    """

    key: CodeLine
    bytes: int
    blocks: int
    category: str
    last_use: CodeLine | None
    by: str
    phase: str
    later_step: Annotated[bool, "a later step uses them, and this one no more"]


def _line_needs(row: NeedRow) -> tuple[LineNeed, ...]:
    return tuple(
        LineNeed(
            code_line(line.key),
            line.bytes,
            line.blocks,
            line.category,
            None if line.last_use is None else code_line(line.last_use),
            line.by,
            line.phase,
            line.later_step,
        )
        for line in row.lines
    )


def code_line(key: Key) -> CodeLine:
    """A key with its file, line and function."""
    if isinstance(key, Place):
        known = bool(key.file)
        return CodeLine(
            str(key), key.file or None, key.line if known else None, key.function or None
        )
    return CodeLine(key.value if isinstance(key, NoPlace) else key, None, None, None)


def _line_of_key(row: LeakRow) -> CodeLine:
    return code_line(row.key)


def _line_of_place(row: Transfer | LaunchRow | OutOfMemory) -> CodeLine:
    return code_line(row.place)


def _line_shares(rows: tuple[ShareRow, ...]) -> tuple[CodeLineShare, ...]:
    return tuple(CodeLineShare(code_line(row.key), row.bytes, row.blocks) for row in rows)


def _named_shares(table: ShareTable) -> tuple[NamedShare, ...]:
    return tuple(NamedShare(str(row.key), row.bytes, row.blocks) for row in table.rows)


def _line_table(table: ShareTable) -> LineTable:
    return LineTable(table.total, _line_shares(table.rows), table.remainder)


def _top_lines(report: Report) -> LineTable | Unavailable:
    table = report.top_lines
    return table if isinstance(table, Unavailable) else _line_table(table)


def _top_modules(report: Report) -> NamedTable | Unavailable:
    table = report.top_modules
    if isinstance(table, Unavailable):
        return table
    return NamedTable(table.total, _named_shares(table), table.remainder)


def _categories(table: CategoryTable) -> Categories:
    return Categories(table.total, _named_shares(table), table.remainder, table.at, table.step)


def _growth_lines(growth: GrowthReport) -> LineTable | None:
    return None if growth.lines is None else _line_table(growth.lines)


def _pin_lines(row: PinRow) -> tuple[CodeLineShare, ...]:
    return _line_shares(row.lines)


def _line_differences(memory: RankMemory) -> tuple[LineDifference, ...]:
    return tuple(LineDifference(code_line(row.key), row.bytes) for row in memory.lines)


def _named_differences(memory: RankMemory) -> tuple[NamedDifference, ...]:
    return tuple(NamedDifference(str(row.key), row.bytes) for row in memory.categories)


def _step_rows(rows: StepRows) -> Iterator[StepRow]:
    return iter(rows)


def _fields(kind: type, *without: str) -> str:
    return " ".join(field.name for field in fields(kind) if field.name not in without)


def _made_at(cause: MemoryCause) -> CodeLine:
    return code_line(cause.made_at)


def _last_use(cause: MemoryCause) -> CodeLine | None:
    return None if cause.last_use is None else code_line(cause.last_use)


def _kept_at(cause: MemoryCause) -> CodeLine | None:
    return None if cause.kept_at is None else code_line(cause.kept_at)


def _holder(cause: MemoryCause) -> str | None:
    """The holder in words."""
    return None if cause.holder is None else cause.holder.text


def cause_shapes() -> dict[type, Any]:
    """The shape of a `MemoryCause`, of every document that has one."""
    return {
        MemoryCause: {
            **keys(_fields(MemoryCause)),
            "made_at": _made_at,
            "last_use": _last_use,
            "kept_at": _kept_at,
            "holder": _holder,
        }
    }


def need_shapes() -> dict[type, Any]:
    """The shapes of a `NeedTable`, of every document that has one."""
    return {
        LineNeed: {"*key": "key", **keys(_fields(LineNeed, "key"))},
        NeedRow: {**keys(_fields(NeedRow)), "lines": _line_needs},
    }


DOCUMENT: Final = Document(
    "gpuprobe.report",
    (2, 15),
    Report,
    "Where the memory of a recording went. Sizes are bytes, durations nanoseconds. A minor version "
    "adds keys.",
    shapes={
        AllocatorCounts: keys("allocated pending cached reserved requested"),
        CategoryTable: _categories,
        DeviceWindow: keys("device peak_allocated peak_reserved end"),
        # A recording may hold findings of other versions, with any rule.
        Finding: {**FINDING, **keys("rule kind message count fingerprint")},
        FindingRow: {"*finding": "finding", "rank": "rank"},
        GrowthReport: keys("first_step last_step bytes bytes_per_step", lines=_growth_lines),
        LaunchRow: {"*place": _line_of_place, **keys(_fields(LaunchRow, "place"))},
        LeakRow: {"*key": _line_of_key, **keys(_fields(LeakRow, "key"))},
        LineDifference: {"*key": "key", "bytes": "bytes"},
        CodeLineShare: {"*key": "key", **keys("bytes blocks")},
        **need_shapes(),
        **cause_shapes(),
        OutOfMemory: {"*place": _line_of_place, **keys(_fields(OutOfMemory, "place"))},
        Peak: keys("at_least at_most exact"),
        Phase: {
            **keys("path duration_ns entries"),
            "host_rss_peak": "host.rss_peak",
            # There are many of them, so they are short.
            "devices": Each("windows", keys("device peak_allocated")),
        },
        PinRow: keys("segment_bytes free held blocks", lines=_pin_lines),
        RankError: keys("rank type message out_of_memory place"),
        RankMemory: {
            **keys(_fields(RankMemory)),
            "categories": _named_differences,
            "lines": _line_differences,
        },
        RankTime: keys(_fields(RankTime) + " stands_out stable cause"),
        Report: {
            "head": head_of,
            **keys(_fields(Report)),
            "top_lines": _top_lines,
            "top_modules": _top_modules,
        },
        Step: {
            **keys("index start_ns duration_ns ended_by"),
            "host_rss_peak": "host.rss_peak",
            "devices": "windows",
            "phases": "phases",
        },
        StepRow: {"*step": "step", **keys("rank outside_phases_ns")},
        StepRows: _step_rows,
        TimeShares: keys(_fields(TimeShares) + " collectives_ns"),
        Transfer: {"*place": _line_of_place, **keys(_fields(Transfer, "place"))},
    },
    added={
        "2.1": "Collective.wire",
        "2.5": "communication",
        "2.6": "compiled children",
        "2.7": "launches",
        "2.8": "LaunchReport.decoded LaunchRow.decoding",
        "2.9": "gpus holders",
        "2.10": "RecordingInfo.missing",
        "2.11": "needs Holder.root Holder.path Holder.kept Holder.node Holder.file Holder.line "
        "Holder.error Holder.via Holder.cycle Holder.inferred "
        "Holder.saved_tensors Holder.saved_bytes",
        "2.12": "head causes LineNeed.later_step NeedRow.modules NeedRow.more_modules lifespans "
        "Suggestion.saves OutOfMemory.could_use OutOfMemory.limited PinnedMemory.lines",
        "2.13": "step_time",
        "2.14": "StepTime.by_rank",
        "2.15": "Effect.bound",
    },
    # A damaged recording, or another clock, can make differences negative.
    bounded=False,
)

to_document = DOCUMENT.plain


EXPLANATION: Final = Document(
    "gpuprobe.explain",
    (1, 6),
    Explanation,
    "What the memory at the peak of a program is needed for, what holds the rest, and what changes "
    "without it. Sizes are bytes.",
    shapes={
        **cause_shapes(),
        **need_shapes(),
    },
    added={"1.3": "Effect.bound", "1.5": "late_variable smaller", "1.6": "ranks"},
)
