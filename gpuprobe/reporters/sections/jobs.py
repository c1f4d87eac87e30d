"""Distributed jobs: how speed scales with the number of ranks."""

from __future__ import annotations

from gpuprobe.model.run.jobs import (
    RUN,
    ScaleRow,
    Scaling,
)
from gpuprobe.model.text import human_ns, plural
from gpuprobe.reporters.sections.parts import (
    Cell,
    Column,
    Line,
    Row,
    Section,
    Table,
)


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
    alone = [f"{row.name} of {row.ranks}" for row in found.rows if 0 < row.recorded < row.ranks]
    if alone:
        text = f"one rank was recorded and represents all: in {', '.join(alone)}"
        notes.append(Line(text, "item"))
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
