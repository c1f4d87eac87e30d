"""Scaling as a table: a row for each recording, and what the loss is made of."""

from __future__ import annotations

from gpuprobe.model.run.scaling import RUN, ScaleRow, Scaling
from gpuprobe.model.text import human_ns
from gpuprobe.reporters.sections.parts import Cell, Column, Line, Row, Section, Table, plural


def scale_sections(found: Scaling) -> list[Section]:
    """The table, and below it what counts as the same work."""
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
            "The last three columns are the loss: they sum to 100 % less the efficiency. "
            "Communication is what collectives take after the last rank has come, waiting what "
            "they take before."
        )
    )
    if unsplit:
        text = f"waits are unknown in {', '.join(unsplit)}: that loss is not split"
        notes.append(Line(text, "item", "unknown"))
    steps = ", ".join(f"{row.name} {plural(row.steps, 'step')}" for row in found.rows)
    notes.append(Line(f"Measured over {steps} that all ranks of it have."))
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
