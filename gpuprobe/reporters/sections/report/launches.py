"""What a step launches on the GPU: by kernel, by line, by module and by phase."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from gpuprobe.analysis.launches import summed
from gpuprobe.model.report import Report
from gpuprobe.model.run.launches import LaunchReport
from gpuprobe.model.values import Unavailable
from gpuprobe.reporters.sections.parts import (
    Cell,
    Column,
    Line,
    Row,
    Section,
    Table,
    capitalized,
    count,
    plural,
    size,
)

_FEW, _MANY = 5, 400
"""Rows of each table of a report, and of one that is shown in full."""

_TABLES: Final = ("kernel", "line", "module", "phase")

_MOST_STEPS = 8
"""Steps whose launches a sentence lists."""


def launch_sections(report: Report, *, full: bool) -> list[Section]:
    """What the first rank launches in one step."""
    found = report.launches
    if found is None:
        return []
    if isinstance(found, Unavailable):
        text = f"{capitalized(found.reason)}."
        return [Section("Launches", (Line(text),), "launches", "Launches")]
    of = f"rank {found.rank}, " if len(report.ranks) > 1 else ""
    title = f"Launches in {of}step {found.step}"
    tables: tuple[Table, ...]
    if full:
        tables = (_configurations(found), *(_table(found, by, _MANY) for by in _TABLES))
    else:
        tables = tuple(_table(found, by, _FEW) for by in ("kernel", "line", "module"))
    figure = Cell(f"{found.count:,}")
    return [Section(title, (*_sentences(found), *tables), "launches", "Launches", figure=figure)]


def _sentences(found: LaunchReport) -> Iterator[Line]:
    kinds = (
        (found.kernels, "kernel"),
        (found.library, "library call"),
        (found.collectives, "collective"),
        (found.graphs, "CUDA graph"),
    )
    text = ", ".join(plural(number, what) for number, what in kinds if number)
    phases = ", ".join(f"{phase} {number:,}" for phase, number, _ in summed(found.rows, "phase"))
    yield Line(f"{_launches(found.count)}: {text}" if text else _launches(0), "item")
    if phases:
        yield Line(phases, "item", "by phase")
    others = [one for one in found.steps if one.step != found.step][:_MOST_STEPS]
    if others:
        listed = ", ".join(f"step {one.step} {one.count:,}" for one in others)
        yield Line(listed, "item", "other traced steps")
    if found.graphs:
        yield Line(f"the CUDA graphs replay {plural(found.replayed, 'kernel')}", "item")
    if found.captured:
        yield Line(f"{_launches(found.captured)} captured in a CUDA graph, not counted", "item")
    if found.kernels:
        share = round(100 * found.tiny / found.kernels)
        yield Line(
            f"{found.tiny:,} of {plural(found.kernels, 'kernel')} ({share}%), with fewer blocks "
            f"than the GPU has multiprocessors ({found.multiprocessors})",
            "item",
            "tiny",
        )
    if found.count > 1:
        yield Line(f"1 launch instead of {found.count:,}", "item", "as one CUDA graph")
    if found.mergeable:
        yield Line(
            f"{found.mergeable:,} of {plural(found.kernels, 'kernel')} are elementwise or "
            "reductions: those that follow one another can become one",
            "item",
            "with torch.compile",
        )


def _launches(number: int) -> str:
    return f"{number:,} launch{'' if number == 1 else 'es'}"


def _table(found: LaunchReport, by: str, top: int) -> Table:
    sums = summed(found.rows, by)
    columns = (
        Column("launches", 10, gap=1, number=True),
        Column("tiny", 8, gap=1, number=True),
        Column(by, 0, gap=2),
    )
    place = by in ("line", "module")
    rows = tuple(
        Row((count(number), count(tiny), Cell(name, place=place)))
        for name, number, tiny in sums[:top]
    )
    rest = sums[top:]
    foot: tuple[Row, ...] = ()
    if rest:
        more = sum(number for _, number, _ in rest)
        tiny_ones = sum(tiny for _, _, tiny in rest)
        foot = (Row((count(more), count(tiny_ones), f"({len(rest)} more)")),)
    return Table(f"launches by {by}", columns, rows, foot)


def _configurations(found: LaunchReport) -> Table:
    """Kernels with their launch configurations."""
    sums: dict[tuple[str, str, str, int], int] = {}
    for row in found.rows:
        if not row.captured:
            key = (row.kernel, _dimensions(row.grid), _dimensions(row.block), row.shared)
            sums[key] = sums.get(key, 0) + row.count
    ordered = sorted(sums.items(), key=lambda item: (-item[1], item[0]))
    columns = (
        Column("launches", 10, gap=1, number=True),
        Column("grid", 12, gap=1, number=True),
        Column("block", 9, gap=1, number=True),
        Column("shared", 10, gap=1, number=True),
        Column("kernel", 0, gap=2),
    )
    rows = tuple(
        Row((count(number), grid, block, size(shared) if shared else "-", kernel))
        for (kernel, grid, block, shared), number in ordered[:_MANY]
    )
    rest = [number for _, number in ordered[_MANY:]]
    foot = (Row((count(sum(rest)), "", "", "", f"({len(rest)} more)")),) if rest else ()
    return Table("launches by kernel and configuration", columns, rows, foot)


def _dimensions(numbers: Sequence[int]) -> str:
    """``384`` or ``1×12×2``; a dash where they are unknown."""
    shown = list(numbers)
    while len(shown) > 1 and shown[-1] == 1:
        shown.pop()
    return "×".join(map(str, shown)) or "-"
