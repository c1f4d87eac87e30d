"""The sections of a report on devices, steps and time, on launches and communication."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from gpuprobe.analysis.communication import summed as summed_transfers
from gpuprobe.analysis.launches import summed as summed_launches
from gpuprobe.model.memory import AllocatorCounts
from gpuprobe.model.report import Report, TimeShares
from gpuprobe.model.run.communication import Transfer
from gpuprobe.model.run.launches import LaunchKind, LaunchReport, LaunchRow
from gpuprobe.model.run.recording import StepRow, StepRows
from gpuprobe.model.run.session import Collective, DeviceWindow
from gpuprobe.model.text import human_bytes, human_ns, plural
from gpuprobe.model.values import Peak, Unavailable
from gpuprobe.reporters.sections.parts import (
    AUTO,
    Cell,
    Column,
    Line,
    Part,
    Row,
    Section,
    Table,
    bounds,
    capitalized,
    count,
    duration,
    known_size,
    size,
)
from gpuprobe.reporters.sections.report.ranks import MOST_DEVICES

_FEW = 5
_STEP_ROWS = 200

# -- devices


def device_sections(report: Report, *, full: bool) -> list[Section]:
    """The peak of each device in each rank. In short: neither for a single device, as the peak's
    section has it, nor for many, as the groups of ranks have them.
    """
    if not full and not 2 <= len(report.devices) <= MOST_DEVICES:
        return []
    rows = tuple(
        Row(
            (
                Cell(str(row.rank), row.rank),
                row.device or "-",
                bounds(row.peak_allocated, full=full),
                bounds(row.peak_reserved, full=full),
                Cell("-" if row.step is None else str(row.step), row.step),
                *_counts(row.end),
                "yes" if row.certain else Cell("no", exact="another may have been higher"),
                Cell(row.phase or "-", place=True),
            )
        )
        for row in report.devices
    )
    columns = (
        Column("rank", 5, number=True),
        Column("device", 9, gap=1),
        Column("peak", 12, number=True),
        Column("reserved", 12, number=True),
        Column("step", 7, number=True),
        *(Column(f"{name} at the end", number=True) for name in _COUNTS),
        Column("certain", hint="no other step or phase was higher"),
        Column("phase", 0, gap=2),
    )
    table = Table("peaks of ranks and devices", columns, rows)
    return [Section("Devices", (table,), "devices", "Devices")] if rows else []


_COUNTS = ("allocated", "pending", "cached", "reserved", "requested")


def _counts(counts: AllocatorCounts) -> tuple[Cell, ...]:
    return tuple(known_size(getattr(counts, name)) for name in _COUNTS)


# -- steps


def step_sections(report: Report, *, full: bool) -> list[Section]:
    """A row per step: the informative ones or, ``full``, at most `_STEP_ROWS`."""
    marks = report.steps.highlights
    rows = report.steps.rows
    if not rows or (marks is None and not full):
        return []
    # What the host takes without a GPU is no time of the program.
    untimed = report.session.virtual and not full
    named: dict[tuple[int, int], list[str]] = {}
    if marks is not None:
        for label in ("first", "worst", *([] if untimed else ["slowest"]), "last"):
            key = (marks.rank, getattr(marks, label))
            named.setdefault(key, []).append("at peak" if label == "worst" else label)
    informative = sorted({at for rank, index in named for at in rows.positions(rank, index)})
    chosen = [rows[at] for at in (_readable(rows, informative) if full else informative)]
    resident = marks is None or marks.device is None
    devices = _device_of_rank(report)
    shown = sorted(chosen, key=lambda row: row.step.index) if not full else chosen
    table = Table(
        "steps",
        (
            Column("step", 6, number=True),
            Column("rank" if len(report.ranks) > 1 else "", number=True),
            Column("device"),
            Column("time", None if untimed else 10, number=True),
            Column("host memory" if resident else "peak", 12, number=True),
            Column("reserved", number=True),
            Column("at end", 12, number=True),
            Column("", 14, gap=2, cut=False),
            Column("longest phase", None if untimed else 0, gap=2),
        ),
        tuple(_step(row, devices.get(row.rank), resident, named) for row in shown),
    )
    hint = ""
    if full and len(chosen) < len(rows):
        hint = f"{len(chosen)} of {plural(len(rows), 'step')} are listed."
    return [Section("Steps", (table,), "steps", "Steps", hint=hint)]


def _readable(rows: StepRows, informative: Sequence[int]) -> Sequence[int]:
    """The positions of the first, the last and the informative of very many steps."""
    most = len(rows)
    if most <= _STEP_ROWS:
        return range(most)
    half = _STEP_ROWS // 2
    return sorted({*range(half), *range(most - half, most), *informative})


def _device_of_rank(report: Report) -> dict[int, str]:
    """The device whose steps are shown, by rank: the one with the rank's peak. Each rank may have
    another GPU.
    """
    highest: dict[int, tuple[int, str]] = {}
    for row in report.devices:
        peak = row.peak_allocated
        least = peak.at_least if isinstance(peak, Peak) else -1
        if row.device and least > highest.get(row.rank, (-2, ""))[0]:
            highest[row.rank] = (least, row.device)
    found = {rank: device for rank, (_, device) in highest.items()}
    marks = report.steps.highlights
    if marks is not None and marks.device is not None:
        found[marks.rank] = marks.device
    return found


def _step(
    row: StepRow, device: str | None, resident: bool, named: dict[tuple[int, int], list[str]]
) -> Row:
    step = row.step
    window = next((one for one in step.windows if one.device == device), None)
    mark = ", ".join(named.get((row.rank, step.index), ()))
    memory = step.host.rss_peak if resident else _peak(window)
    return Row(
        (
            Cell(str(step.index), step.index),
            Cell(str(row.rank), row.rank),
            device or "-",
            duration(step.duration_ns),
            bounds(memory),
            Cell("-", -1) if window is None else bounds(window.peak_reserved),
            Cell("-", -1) if window is None else known_size(window.end.allocated),
            Cell(mark, tone="strong" if mark else ""),
            _longest(row),
        )
    )


def _peak(window: DeviceWindow | None) -> Peak | Unavailable:
    return Unavailable("not measured") if window is None else window.peak_allocated


def _longest(row: StepRow) -> str:
    outer = [phase for phase in row.step.phases if "/" not in phase.path]
    if not outer or not row.step.duration_ns:
        return "-"
    phase = max(outer, key=lambda one: one.duration_ns)
    return f"{phase.path} {phase.duration_ns / row.step.duration_ns:.0%}"


# -- time


def time_sections(report: Report, *, full: bool) -> list[Section]:
    """The first rank's time. In short: only if it adds to the steps, and if there is a GPU."""
    found = report.time
    if report.session.virtual and not full:
        return []
    if found is None or not (full or found.collectives or found.gpu_steps):
        return []
    total = found.duration_ns or 1
    shares = ", ".join(f"{phase.path} {phase.ns / total:.0%}" for phase in found.phases)
    of = f"rank {found.rank}, " if len(report.ranks) > 1 else ""
    parts: list[Part] = [Line(f"{of}{plural(found.steps, 'step')}: {shares}", "item")]
    if found.gpu_steps:
        spent = sorted(found.phases, key=lambda phase: -phase.gpu_ns)
        on_gpu = ", ".join(
            f"{phase.path} {phase.gpu_ns / (found.gpu_ns or 1):.0%}"
            for phase in spent
            if phase.gpu_ns
        )
        text = f"on the GPU, {human_ns(found.gpu_ns // found.gpu_steps)} per step: {on_gpu}"
        parts.append(Line(text, "item"))
    if full:
        parts = [_phases(found), *parts[1:]]
        parts += [_collectives(found, total)] if found.collectives else []
    else:
        parts += [_call(call, total) for call in found.collectives[:_FEW]]
        if len(found.collectives) > _FEW:
            parts.append(Line(f"… {plural(len(found.collectives) - _FEW, 'more operation')}"))
    return [Section("Where the time goes", tuple(parts), "time", "Time")]


_MOST_PHASES = 1_000
"""Rows of the table of phases: the longest, as a program can name any number of them."""


def _phases(found: TimeShares) -> Table:
    total = found.duration_ns or 1
    steps = found.steps or 1

    def row(name: str, ns: int, gpu_ns: int | None) -> Row:
        share = Cell(f"{ns / total:.1%}", ns, share=ns / total)
        on_gpu = Cell("-", -1) if gpu_ns is None else duration(gpu_ns // (found.gpu_steps or 1))
        return Row((name, duration(ns // steps), share, Cell("", ns, share=ns / total), on_gpu))

    timed = bool(found.gpu_steps)
    listed, others = found.phases[:_MOST_PHASES], found.phases[_MOST_PHASES:]
    rows = [row(one.path, one.ns, one.gpu_ns if timed else None) for one in listed]
    if others:
        gpu_ns = sum(one.gpu_ns for one in others) if timed else None
        rows.append(
            row(f"({plural(len(others), 'other phase')})", sum(one.ns for one in others), gpu_ns)
        )
    rows.append(row("(in no phase)", found.outside_phases_ns, None))
    columns = (
        Column("phase", 24),
        Column("per step", 10, number=True),
        Column("share", 8, number=True),
        Column("", 24, gap=1, bar=True),
        Column("on the GPU", number=True),
    )
    foot = Row(
        (
            f"total of rank {found.rank}, mean of {plural(found.steps, 'step')}",
            duration(found.duration_ns // steps),
            "100.0%",
            "",
            duration(found.gpu_ns // found.gpu_steps) if timed else "-",
        )
    )
    return Table("time by phase", columns, tuple(rows), (foot,))


def _collectives(found: TimeShares, total: int) -> Table:
    rows = tuple(
        Row((call.op, count(call.count), size(call.bytes), _wire(call), _held(call, total)))
        for call in found.collectives
    )
    held = f"blocked the program in total, of {human_ns(found.duration_ns)}"
    columns = (
        Column("collective"),
        Column("calls", number=True),
        Column("bytes", number=True),
        Column("on the wire", number=True, hint="sent by this rank, by the algorithms of a ring"),
    )
    foot = Row(("total", "", "", "", duration(found.collectives_ns)))
    spent = Column("blocked the program", hint=held)
    return Table("calls of torch.distributed", (*columns, spent), rows, (foot,))


def _wire(call: Collective) -> Cell:
    return Cell("-", -1) if isinstance(call.wire, Unavailable) else size(call.wire)


def _held(call: Collective, total: int) -> Cell:
    spent = call.host_ns
    if isinstance(spent, Unavailable):
        return Cell(spent.reason, -1)
    return Cell(f"{human_ns(spent)} ({spent / total:.0%})", spent)


def _call(call: Collective, total: int) -> Line:
    held = _held(call, total).text
    if not isinstance(call.host_ns, Unavailable):
        held = f"blocked the program {held}"
    sent = ""
    if not isinstance(call.wire, Unavailable) and call.wire:
        sent = f"{human_bytes(call.wire)} on the wire · "
    text = f"{call.count}× · {human_bytes(call.bytes)} · {sent}{held}"
    return Line(text, "item", call.op)


_MANY_LAUNCHES = 400
"""Rows of each table of a short report, and of a full one."""

_TABLES: Final = ("kernel", "line", "module", "phase")

_MOST_STEPS = 8
"""The most steps whose launches a sentence lists."""


def launch_sections(report: Report) -> list[Section]:
    """The launches of the first rank in one step."""
    found = report.launches
    if found is None:
        return []
    if isinstance(found, Unavailable):
        text = f"{capitalized(found.reason)}."
        return [Section("Launches", (Line(text),), "launches", "Launches")]
    of = f"rank {found.rank}, " if len(report.ranks) > 1 else ""
    title = f"Launches in {of}step {found.step}"
    tables = (_configurations(found), *(_table(found.rows, by, _MANY_LAUNCHES) for by in _TABLES))
    figure = Cell(f"{found.count:,}")
    whole = Section(title, (*_sentences(found), *tables), "launches", "Launches", figure=figure)
    return [whole, *_decoding(found, of, _MANY_LAUNCHES)]


def _decoding(found: LaunchReport, of: str, top: int) -> list[Section]:
    """What ``generate`` launched for each token after the prefill, if it decoded any."""
    if not found.decoded:
        return []
    tokens = found.decoded
    rows = [row for row in found.rows if row.decoding and not row.captured]
    kernels = sum(row.count for row in rows if row.kind is LaunchKind.KERNEL)
    launches = sum(row.count for row in rows)
    tiny = sum(row.count for row in rows if row.tiny)
    parts: list[Line | Table] = [
        Line(
            f"{_mean(launches, tokens)} launches, {_mean(kernels, tokens)} of them kernels; mean "
            f"of {plural(tokens, 'token')} of every sequence, after the prefill",
            "item",
        )
    ]
    if kernels:
        text = f"{_mean(tiny, tokens)} of {_mean(kernels, tokens)} kernels"
        parts.append(Line(f"{text} ({tiny / kernels:.0%})", "item", "tiny"))
    parts += [_table(rows, by, top, tokens) for by in ("kernel", "line", "module")]
    title = f"Launches per decoded token in {of}step {found.step}"
    figure = Cell(_mean(launches, tokens))
    return [Section(title, tuple(parts), "decoding", "Decoding", figure=figure)]


def _mean(number: int, tokens: int) -> str:
    """``103``, or ``103.4``."""
    mean = number / tokens
    return f"{mean:,.0f}" if number % tokens == 0 else f"{mean:,.1f}"


def _sentences(found: LaunchReport) -> Iterator[Line]:
    kinds = (
        (found.kernels, "kernel"),
        (found.library, "library call"),
        (found.collectives, "collective"),
        (found.graphs, "CUDA graph"),
    )
    text = ", ".join(plural(number, what) for number, what in kinds if number)
    phases = ", ".join(
        f"{phase} {number:,}" for phase, number, _ in summed_launches(found.rows, "phase")
    )
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


def _table(launched: Sequence[LaunchRow], by: str, top: int, tokens: int = 1) -> Table:
    """Launches by one of their keys; with ``tokens``, for each of them."""

    def mean(number: int) -> Cell:
        return Cell(_mean(number, tokens), number / tokens) if tokens > 1 else count(number)

    sums = summed_launches(launched, by)
    columns = (
        Column("launches", 10, gap=1, number=True),
        Column("tiny", 8, gap=1, number=True),
        Column(by, 0, gap=2),
    )
    place = by in ("line", "module")
    rows = tuple(
        Row((mean(number), mean(tiny), Cell(name, place=place)))
        for name, number, tiny in sums[:top]
    )
    rest = sums[top:]
    foot: tuple[Row, ...] = ()
    if rest:
        more = sum(number for _, number, _ in rest)
        tiny_ones = sum(tiny for _, _, tiny in rest)
        foot = (Row((mean(more), mean(tiny_ones), f"({len(rest)} more)")),)
    title = f"launches by {by}" if tokens == 1 else f"launches per token by {by}"
    return Table(title, columns, rows, foot)


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
        for (kernel, grid, block, shared), number in ordered[:_MANY_LAUNCHES]
    )
    rest = [number for _, number in ordered[_MANY_LAUNCHES:]]
    foot = (Row((count(sum(rest)), "", "", "", f"({len(rest)} more)")),) if rest else ()
    return Table("launches by kernel and configuration", columns, rows, foot)


def _dimensions(numbers: Sequence[int]) -> str:
    """``384`` or ``1×12×2``; a dash if they are unknown."""
    shown = list(numbers)
    while len(shown) > 1 and shown[-1] == 1:
        shown.pop()
    return "×".join(map(str, shown)) or "-"


_FEW_TRANSFERS, _MANY_TRANSFERS = 3, 400
"""Rows of each table of a short report, and of a full one."""


def communication_sections(report: Report, *, full: bool) -> list[Section]:
    """The communication of the first rank in one step."""
    found = report.communication
    if found is None:
        return []
    of = f"rank {found.rank}, " if len(report.ranks) > 1 else ""
    title = f"Communication of {of}step {found.step}"
    return [communication_section(title, found.rows, _MANY_TRANSFERS if full else _FEW_TRANSFERS)]


def communication_section(title: str, rows: Sequence[Transfer], top: int) -> Section:
    """Sums of ``rows`` by operation, line and module, with ``top`` rows and a remainder each."""
    wire = human_bytes(sum(row.wire for row in rows))
    tables = tuple(_sent(rows, by, top) for by in ("operation", "line", "module"))
    text = f"{title}: {wire} sent by this rank"
    return Section(text, tables, "communication", "Communication")


def _sent(rows: Sequence[Transfer], by: str, top: int) -> Table:
    found = summed_transfers(rows, by)
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
