"""Distributed jobs: why one hangs, and how speed scales with the number of ranks."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence

from gpuprobe.model.findings import Level
from gpuprobe.model.place import Place
from gpuprobe.model.run.jobs import (
    MISMATCH,
    MISSING,
    RUN,
    Hang,
    HangReport,
    HangSide,
    ScaleRow,
    Scaling,
)
from gpuprobe.model.text import human_ns, ranges
from gpuprobe.reporters.sections.parts import (
    Cell,
    Column,
    Line,
    Part,
    Row,
    Section,
    Table,
    bulleted,
    duration,
    plural,
)
from gpuprobe.reporters.sections.report.steps import communication_section

_MOST_SIDES = 8
_FEW_ROWS = 8


def hang_sections(found: HangReport) -> list[Section]:
    """The hangs of a job: a section for each process group with a collective that cannot end."""
    about = f"dumps of {plural(len(found.ranks), 'rank')}, {plural(found.groups, 'process group')}"
    head: list[Part] = [Line(about, "heading")]
    if not found.hangs:
        head.append(Line("No collective waits for a rank, and all ranks called the same ones."))
    sections = [Section(parts=tuple(head), name="dumps")]
    if found.unreadable:
        texts = [f"rank {one.rank}: {one.reason}" for one in found.unreadable[:_MOST_SIDES]]
        if len(found.unreadable) > _MOST_SIDES:
            texts.append(f"… {len(found.unreadable) - _MOST_SIDES} more: --json lists them")
        title = "Dumps that cannot be read: the rank may have ended while it wrote"
        sections.append(
            Section(title, bulleted(texts), "unreadable", "Unreadable", level=Level.WARNING)
        )
    unreadable = {one.rank for one in found.unreadable}
    sections += [_section(hang, number, unreadable) for number, hang in enumerate(found.hangs)]
    if found.communication:
        title = f"Communication of rank {found.ranks[0]}, as far as its dump goes back"
        sections.append(communication_section(title, found.communication, _FEW_ROWS))
    if found.arrivals:
        sections.append(_arrivals(found))
    if found.skipped:
        few = ", ".join(found.skipped[:5]) + (", …" if len(found.skipped) > 5 else "")
        text = f"not dumps: {few}"
        sections.append(Section("Skipped", bulleted((text,)), "skipped", "Skipped"))
    return sections


def _arrivals(found: HangReport) -> Section:
    rows = tuple(
        Row(
            (
                Cell(str(row.rank), row.rank),
                Cell(str(row.last), row.last),
                Cell(str(row.collectives), row.collectives),
                duration(row.late_ns),
            )
        )
        for row in found.arrivals[:_FEW_ROWS]
    )
    columns = (
        Column("rank", 6, number=True),
        Column("last to call", 14, number=True),
        Column("of", 8, number=True),
        Column("late by, in total", 20, number=True),
    )
    parts: list[Part] = [Table("arrivals", columns, rows)]
    if len(found.arrivals) > _FEW_ROWS:
        parts.append(Line(f"… {len(found.arrivals) - _FEW_ROWS} more: --json lists them"))
    title = "Last to call a collective, by the clocks of the machines"
    return Section(title, tuple(parts), "arrivals", "Arrivals")


def _section(hang: Hang, number: int, unreadable: Container[int]) -> Section:
    parts: list[Part] = [Line(_what(hang))]
    verb = "called:" if hang.kind == MISMATCH else "in"
    parts += _sides(hang.sides, verb)
    for side in hang.absent[:_MOST_SIDES]:
        last = (
            f"last called {side.op} (number {side.sequence})"
            if side.op
            else "has called no collective"
        )
        parts.append(Line(f"{_ranks(side.ranks)} {last}{_at(side)}", "item", "missing"))
    gone = [rank for rank in hang.no_dump if rank not in unreadable]
    damaged = [rank for rank in hang.no_dump if rank in unreadable]
    if gone:
        text = f"{_ranks(gone)} left no dump: ended, or blocked outside collectives"
        parts.append(Line(text, "item", "missing"))
    if damaged:
        text = f"{_ranks(damaged)} left no dump that can be read"
        parts.append(Line(text, "item", "missing"))
    title = f"Process group {hang.group}"
    return Section(title, tuple(parts), f"group-{number}", title, level=Level.ERROR)


def _what(hang: Hang) -> str:
    if hang.kind == MISMATCH:
        return f"Ranks differ in collective number {hang.sequence}, the first that does not match:"
    if hang.kind == MISSING:
        missing = [rank for side in hang.absent for rank in side.ranks] + list(hang.no_dump)
        return f"Collective number {hang.sequence} waits for {_ranks(missing)}:"
    return (
        f"All ranks have called collective number {hang.sequence}, and it does not end: a slow or "
        "broken link, or a rank that stopped on its device:"
    )


def _sides(sides: Sequence[HangSide], verb: str) -> Iterator[Line]:
    for side in sides[:_MOST_SIDES]:
        state = f", {side.state}" if side.state else ""
        yield Line(f"{_ranks(side.ranks)} {verb} {side.op}{state}{_at(side)}", "item", code=True)
    if len(sides) > _MOST_SIDES:
        yield Line(f"… {len(sides) - _MOST_SIDES} more: --json lists them")


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {ranges(ranks)}"


def _at(side: HangSide) -> str:
    return f" at {side.place}" if isinstance(side.place, Place) else ""


def scale_sections(found: Scaling) -> list[Section]:
    """Scaling: a row for each recording, and the definition of the unit of work."""
    columns = (
        Column("recording", 24),
        Column("ranks", 6, number=True),
        Column("per unit", 10, number=True, hint="device time for one unit of work"),
        Column("per second", 11, number=True, hint="units of work on all ranks"),
        Column("speed-up", 9, number=True),
        Column("efficiency", 11, number=True),
        Column("communication", 14, number=True),
        Column("waiting", 8, number=True),
        Column("own work", 9, number=True),
    )
    rows = tuple(_row(row) for row in found.rows)
    unit = (
        "One unit of work is a whole run: the same data, divided among the ranks."
        if found.work == RUN
        else "One unit of work is a step of one rank: every rank has a batch of the same size."
    )
    unsplit = [row.name for row in found.rows if row.lost_own is None]
    notes = [Line(unit)]
    notes.append(
        Line(
            "The last three columns divide the lost efficiency; with the efficiency they sum to "
            "100 %. Communication: collectives, once every rank has called them. Waiting: until "
            "the last rank calls. Own work: work that takes longer than in the first recording."
        )
    )
    if unsplit:
        text = f"the loss of {', '.join(unsplit)} is not divided: waits were not recorded"
        notes.append(Line(text, "item", "unknown"))
    steps = ", ".join(f"{row.name} {plural(row.steps, 'step')}" for row in found.rows)
    if found.predicted:
        notes.append(
            Line(
                "Predicted for simulated GPUs, nothing was measured: gpuprobe report shows the "
                "range of each, and where its prices are from."
            )
        )
    else:
        notes.append(Line(f"Measured over {steps}: those that all ranks have recorded."))
    return [Section("Scaling", (Table("scaling", columns, rows), *notes), "scaling", "Scaling")]


def _row(row: ScaleRow) -> Row:
    return Row(
        (
            row.name,
            Cell(str(row.ranks), row.ranks),
            Cell(human_ns(row.total_ns), row.total_ns),
            f"{row.throughput:.4g}",
            f"{row.speedup:.2f}x",
            f"{row.efficiency:.1%}",
            _share(row.lost_communication),
            _share(row.lost_waiting),
            _share(row.lost_own),
        )
    )


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value + 0.0:.1%}".replace("-0.0%", "0.0%")
