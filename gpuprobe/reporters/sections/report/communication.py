"""What a rank sends to others: by operation, by line and by module."""

from __future__ import annotations

from collections.abc import Sequence

from gpuprobe.analysis.communication import summed
from gpuprobe.model.report import Report
from gpuprobe.model.run.communication import Transfer
from gpuprobe.model.text import human_bytes
from gpuprobe.reporters.sections.parts import AUTO, Cell, Column, Row, Section, Table, size

_FEW, _MANY = 3, 400
"""Rows of each table of a report, and of one that is shown in full."""


def communication_sections(report: Report, *, full: bool) -> list[Section]:
    """What the first rank sends in one step."""
    found = report.communication
    if found is None:
        return []
    of = f"rank {found.rank}, " if len(report.ranks) > 1 else ""
    title = f"Communication of {of}step {found.step}"
    return [communication_section(title, found.rows, _MANY if full else _FEW)]


def communication_section(title: str, rows: Sequence[Transfer], top: int) -> Section:
    """``rows`` added up, with ``top`` rows in each table and the rest in one more."""
    wire = human_bytes(sum(row.wire for row in rows))
    tables = tuple(_sent(rows, by, top) for by in ("operation", "line", "module"))
    text = f"{title}: {wire} sent by this rank"
    return Section(text, tables, "communication", "Communication")


def _sent(rows: Sequence[Transfer], by: str, top: int) -> Table:
    found = summed(rows, by)
    columns = (
        Column(by, AUTO, cut=False),
        Column("calls", 6, gap=2, number=True),
        Column("payload", 10, gap=1, number=True),
        Column("wire", 10, gap=1, number=True),
    )
    place = by == "line"
    shown = tuple(
        Row((Cell(name, place=place), str(count), size(payload), size(wire)))
        for name, count, payload, wire in found[:top]
    )
    rest = found[top:]
    if rest:
        counts, payloads, wires = (
            sum(amounts) for amounts in zip(*[row[1:] for row in rest], strict=True)
        )
        shown += (Row((f"({len(rest)} more)", str(counts), size(payloads), size(wires))),)
    return Table(f"communication by {by}", columns, shown)
