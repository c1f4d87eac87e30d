"""The section on what the memory at the peak is needed for."""

from __future__ import annotations

from collections.abc import Iterator

from gpuprobe.model.needs import (
    Lifespan,
    LifespanTable,
    Need,
    NeedLine,
    NeedRow,
    NeedTable,
    use_in_words,
)
from gpuprobe.model.report import Report
from gpuprobe.model.text import human_bytes, human_ns
from gpuprobe.model.values import Unavailable
from gpuprobe.reporters.sections.parts import (
    Cell,
    Column,
    Line,
    Part,
    Row,
    Section,
    Table,
    count,
    named,
    size,
)

_BAR = 24
_FEW = 3
_LEAST = 0.01
"""The share of the total from which the lines of memory that is not needed are named."""
_OF_MODULES = 0.1
"""The share of a row from which its modules are listed, where it has one line."""

_COLUMNS = (
    Column("bytes", 10, number=True),
    Column("share", 6, gap=1, number=True),
    Column("", _BAR, gap=1, bar=True),
    Column("blocks", number=True),
    Column("need", 0, gap=2),
)


def needs_section(report: Report, *, full: bool = False) -> list[Section]:
    """What the memory is needed for. If its uses were not traced, how long it lives at least; that
    of a recording only with ``full``, as it has steps.
    """
    table = report.needs
    title, name, short = "What it is needed for", "needs", "Needs"
    if isinstance(table, Unavailable):
        if not full and report.recording.kind != "snapshot":
            return []
        text = f"unknown: {table.reason}"
        if report.recording.kind == "snapshot":
            text = "unknown: a snapshot has no uses of memory, only when it was made and freed"
            if report.lifespans is None:
                text = "unknown: this snapshot has no history, only the memory at one moment"
        if report.lifespans is None:
            return [Section(title, (Line(text),), name, short)]
        lives = Line("How long it lives:"), _lifespans(report.lifespans)
        return [Section(title, (Line(text), *lives), name, short)]
    if report.peak.nearest_trace is not None and table.step is not None:
        title += f" at the high water mark of step {table.step}"
    parts = needs_parts(table, full=full)
    hint = "By the operators that used each block, at level trace on a simulated GPU."
    return [Section(title, tuple(parts), name, short, hint=hint)]


_SPANS = {
    (False, False): "older than the trace, kept",
    (False, True): "older than the trace, freed",
    (True, False): "made in the trace, kept",
    (True, True): "made and freed in the trace",
}


def _lifespans(table: LifespanTable) -> Table:
    def row(span: Lifespan) -> Row:
        share = span.bytes / table.total if table.total else 0.0
        shortest, longest = (human_ns(ns) for ns in (span.shortest_ns, span.longest_ns))
        whole = span.begins_in_trace and span.ends_in_trace
        life = f"{shortest} to {longest}" if whole else f"at least {shortest}"
        if not table.timed:
            life = "-"
        return Row((
            size(span.bytes),
            Cell(f"{share:.1%}", share),
            count(span.blocks),
            Cell(life, span.shortest_ns),
            _SPANS[span.begins_in_trace, span.ends_in_trace],
        ))  # fmt: skip

    columns = (
        Column("bytes", 10, number=True),
        Column("share", 6, gap=1, number=True),
        Column("blocks", 6, number=True),
        Column("lives", 23, number=True),
        Column("", 0, gap=2),
    )
    total = Row((size(table.total), "", "", "", "total"))
    return Table("memory by its life", columns, tuple(map(row, table.rows)), (total,), header=False)


def needs_parts(table: NeedTable, *, full: bool = False, needed: bool = False) -> list[Part]:
    """The table of needs, and the lines of what is not needed; with ``needed``, also those with the
    most of what is.
    """
    rows = tuple(_row(row, table) for row in table.rows)
    total = Row((size(table.total), "", "", "", "total"))
    shown = Table("memory by need", _COLUMNS, rows, (total,), header=False)
    return [shown, *_lines(table, full=full, needed=needed)]


def _row(row: NeedRow, table: NeedTable) -> Row:
    share = row.bytes / table.total if table.total else 0.0
    return Row((
        size(row.bytes),
        Cell(f"{share:.1%}", share),
        Cell("", share, share=share),
        count(row.blocks),
        Need(row.need).label,
    ))  # fmt: skip


def _lines(table: NeedTable, *, full: bool, needed: bool) -> Iterator[Line]:
    """The lines of the memory that is not needed, with ``needed`` also the first ones of other
    memory; ``full``: of all memory. And what would be left without it.
    """
    for row in table.rows:
        need = Need(row.need)
        if not (full or needed or need.needless):
            continue
        few = row.lines if full else row.lines[:_FEW]
        for line in few:
            if full or line.bytes >= _LEAST * table.total:
                yield Line(_about(line, need), "item", indent=4)
        if full and row.more:
            yield Line(f"{human_bytes(row.more)} {need.label}: from other lines", "item", indent=4)
        # Such as the line that calls a Trainer, for all of its memory.
        if len(few) > 1 and len({str(line.key) for line in few}) == 1:
            yield from _modules(row, need, least=_OF_MODULES)
        elif full:
            yield from _modules(row, need)
    saved = table.total - table.freed_after_use
    if full or saved >= _LEAST * table.total:
        yield Line(
            f"If every block were freed after its last use, {human_bytes(table.freed_after_use)} "
            f"would be the most in this trace instead of {human_bytes(table.total)}."
        )


def _about(line: NeedLine, need: Need) -> str:
    """One line of the program: ``32.0 MiB never used again: activation from train.py:5``."""
    blocks = f" in {line.blocks:,} blocks" if line.blocks != 1 else ""
    later = f" {_later(line)}" if need is Need.LATER else ""
    what = f"{named(line.category)} from {named(line.key)}"
    text = f"{human_bytes(line.bytes)}{blocks} {need.label}{later}: {what}"
    if need is not Need.LATER and (line.last_use is not None or line.by):
        again = "will be " if need is Need.NOT_YET else ""
        text += f"; {again}last used by {_use(line)}"
    return text


def _later(line: NeedLine) -> str:
    """What needs memory later: ``by the backward pass of model.py:55``."""
    if line.later_step:
        return "by a later step"
    return f"by {_use(line)}"


def _use(line: NeedLine) -> str:
    place = "" if line.last_use is None else named(line.last_use)
    return use_in_words(line.by, place, line.phase)


def _modules(row: NeedRow, need: Need, *, least: float = 0.0) -> Iterator[Line]:
    """The modules that made the blocks of a state, in one sentence, if they made more than this
    part of its bytes.
    """
    known = sum(one.bytes for one in row.modules if not one.key.startswith("("))
    if known <= least * row.bytes:
        return
    parts = [f"{named(one.key)} {human_bytes(one.bytes)}" for one in row.modules]
    if row.more_modules:
        parts.append(f"others {human_bytes(row.more_modules)}")
    yield Line(f"{need.label}, by module: {', '.join(parts)}", "item", indent=4)
