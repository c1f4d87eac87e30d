"""The memory sections of a report: the peak, its causes, growth, failures and fragmentation."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from gpuprobe.analysis.repeats import REPEATING, RepeatedShare, share_groups
from gpuprobe.model import report as model
from gpuprobe.model.report import (
    AT_NEAREST_TRACE,
    AT_PEAK,
    AT_STEP_END,
    CategoryTable,
    DeviceUsage,
    Layout,
    Remainder,
    Report,
    Space,
    remainder,
)
from gpuprobe.model.run.holders import Holder
from gpuprobe.model.text import human_bytes, human_delta, plural
from gpuprobe.model.values import Peak, Unavailable
from gpuprobe.reporters.sections.parts import (
    Cell,
    Column,
    Line,
    Part,
    Row,
    Section,
    Table,
    amount,
    change,
    count,
    items,
    named,
    peak_text,
    size,
)

_BAR = 24
_FEW = 5
_FEW_HOLDERS = 3
_SOURCES = 3  # the first lines, with their source


# -- the peak


def peak_section(report: Report, *, full: bool = False) -> Section:
    """The peak: its amount, place and time, and whether it is exact."""
    peak = report.peak
    title, name = "Peak", "peak"
    if peak.measure is None:
        text = "nothing was measured: the recording has no steps and no trace"
        return Section(title, (Line(text),), name)
    resident = peak.measure == "host_rss"
    what = "of the process in the host's memory" if resident else f"allocated on {peak.device}"
    where = [f"rank {peak.rank}"] if len(report.ranks) > 1 else []
    where += [f"phase {peak.phase}"] if peak.phase else []
    where += [f"step {peak.step}"] if peak.step is not None else []
    place = f", in {', '.join(where)}" if where else ""
    figure = peak_text(peak.amount)
    parts = [Line(what + place, "item", lead=figure), *_peak_notes(report)]
    for label, value in (("reserved", peak.reserved), ("host memory", peak.host_rss)):
        if isinstance(value, Peak) and not (resident and label == "host memory"):
            most = f"up to {human_bytes(value.at_most)}"
            parts.append(Line(peak_text(value) if full else most, "item", label))
    if resident and isinstance(peak.allocated, Unavailable):
        parts.append(Line(f"unknown ({peak.allocated.reason})", "item", "allocated"))
    return Section(title, tuple(parts), name, "Peak", figure=Cell(figure))


def _was_traced_late(report: Report) -> bool:
    """Whether the peak's trace began after its step, or belongs to none."""
    peak = report.peak
    if peak.step is None or not isinstance(peak.before_trace, int):
        return True
    starts = [
        window.start.allocated
        for row in report.steps.rows
        if (row.rank, row.step.index) == (peak.rank, peak.step)
        for window in row.step.windows
        if window.device == peak.device
    ]
    return any(isinstance(start, int) and start < peak.before_trace for start in starts)


def _peak_notes(report: Report) -> Iterator[Line]:
    peak = report.peak
    if not peak.certain:
        text = "Only bounds of the peaks are known: another step or phase may have been"
        yield Line(f"{text} higher.")
    if isinstance(peak.before_trace, int) and peak.before_trace:
        began = "its trace began" if _was_traced_late(report) else "that step began"
        yield Line(f"{human_bytes(peak.before_trace)} of it was alive before {began}")
    least = peak.amount.at_least if isinstance(peak.amount, Peak) else None
    if isinstance(peak.traced, int) and least is not None and peak.traced != least:
        yield Line(f"the trace accounts for {human_bytes(peak.traced)}")
    nearest = peak.nearest_trace
    if nearest is not None and isinstance(peak.traced, Unavailable):
        of = f"step {nearest.step}, the highest traced step"
        below = f"{human_bytes(nearest.below_peak)} below the peak"
        yield Line(f"{peak.traced.reason}. The tables are of {of}: {below}.", "item")


def when(report: Report) -> str:
    """The time that the tables of lines and modules describe."""
    nearest = report.peak.nearest_trace
    return "at the peak" if nearest is None else f"at the high water mark of step {nearest.step}"


def _categories_title(table: CategoryTable | Unavailable) -> str:
    if isinstance(table, Unavailable) or table.at == AT_PEAK:
        return "Categories at the peak"
    of = {AT_STEP_END: "end", AT_NEAREST_TRACE: "high water mark"}[table.at]
    return f"Categories at the {of} of step {table.step}"


# -- shares of the peak


def share_sections(report: Report, top: int) -> list[Section]:
    """The memory at the peak by category, by line and by module, in at most ``top`` rows each."""
    lines, modules = report.top_lines, report.top_modules
    of = when(report)
    nowhere = not isinstance(modules, Unavailable) and modules.rows and all(
        _is_nowhere(row) for row in modules.rows
    )  # fmt: skip
    by_module: tuple[Part, ...] = (Line("unknown: no module was recorded"),)
    if not nowhere:
        by_module = _shares(modules, "module", top=top)
    return [
        Section(
            _categories_title(report.categories),
            _shares(report.categories, "category"),
            "categories",
            "Categories",
        ),
        Section(
            f"Lines {of}",
            _shares(lines, "line", top=top),
            "lines",
            "Lines",
            hint="By the innermost line of your code on the stack of each allocation. A line with "
            "several modules opens to them.",
        ),
        Section(
            f"Modules {of}",
            by_module,
            "modules",
            "Modules",
            hint="By the module that was running when the memory was allocated. Modules of equal "
            "layers are one row, such as h.*.mlp ×48.",
        ),
    ]


def _is_nowhere(row: model.ShareRow) -> bool:
    """Whether the row is the memory without a line, or without a module."""
    return str(row.key).startswith("(")


def _shares(
    table: model.ShareTable | Unavailable, by: str, *, blocks: bool = True, top: int = 0
) -> tuple[Part, ...]:
    """A table of bytes, shares, numbers of ``blocks`` and names; the last row is the total.
    ``top``: its number of rows if it is complete; then lines and modules that repeat are one row.
    """
    if isinstance(table, Unavailable):
        return (Line(f"unknown: {table.reason}"),)
    rest = table.remainder
    total = table.total
    known = [row.bytes for row in table.rows] + [rest.bytes if isinstance(rest.bytes, int) else 0]
    whole = total if isinstance(total, int) else sum(known)

    def row(number: int, held_in: int | None, name: Cell, members: Iterable[Row] = ()) -> Row:
        share = number / whole if whole else 0.0
        percent = Cell(f"{share:.1%}" if isinstance(total, int) else "", share)
        counted = ("-" if held_in is None else count(held_in),) if blocks else ()
        cells = (size(number), percent, Cell("", share, share=share), *counted, name)
        return Row(cells, members=tuple(members))

    def single(one: model.ShareRow) -> Row:
        return row(one.bytes, one.blocks, Cell(named(one.key), place=True))

    def together(group: RepeatedShare) -> Row:
        sum_, times = group.sum, len(group.members)
        name = Cell(group.name, place=True, times=times)
        inside = map(single, group.members) if times > 1 else map(together, _modules(group))
        return row(sum_.bytes, sum_.blocks, name, inside)

    rows, foot = [], []
    if by in REPEATING and top and not rest.bytes:
        groups = share_groups(table.rows, by)
        rows = [together(group) for group in groups[:top]]
        rest = remainder([one for group in groups[top:] for one in group.members], f"{by}s")
    else:
        rows = list(map(single, table.rows))
    if isinstance(rest.bytes, int) and rest.bytes:
        foot.append(row(rest.bytes, rest.blocks, Cell(f"({rest.what})")))
    if not rows and not foot:
        return (Line("nothing was allocated"),)
    unknown: tuple[Line, ...] = ()
    if isinstance(total, int):
        foot.append(Row((size(total), "", "", *([""] if blocks else []), "total")))
    else:
        unknown = (Line(f"the rest is unknown: {total.reason}"),)
    columns = (
        Column("bytes", 10, number=True),
        Column("share", 6, gap=1, number=True),
        Column("", _BAR, gap=1, bar=True),
        *([Column("blocks", number=True)] if blocks else []),
        Column(by, 0, gap=2),
    )
    sources = _SOURCES if by == "line" else 0
    name = f"memory by {by}"
    shown = Table(name, columns, tuple(rows), tuple(foot), header=False, sources=sources)
    return (shown, *unknown)


def _modules(group: RepeatedShare) -> list[RepeatedShare]:
    """The modules that allocated at a line, if there are several; those that repeat as one."""
    first = group.members[0]
    if not isinstance(first, model.LineRow) or len(first.modules) < 2:
        return []
    return share_groups(first.modules, "module")


def causes_section(report: Report) -> Section:
    """The three lines with the most memory, and the rest. Categories instead, if most of the memory
    has no known line: it was allocated before the trace, or by autograd's threads.
    """
    title = "Largest parts"
    tables = [
        (table, _largest_named(table))
        for table in (report.top_lines, report.categories)
        if not isinstance(table, Unavailable)
    ]
    if len(tables) == 2 and not _holds_half(*tables[0]):
        tables.reverse()
    for table, largest in tables:
        if not largest:
            continue
        if isinstance(table, CategoryTable) and table.at == AT_STEP_END:
            title += f" at the end of step {table.step}"
        elif report.peak.nearest_trace is not None:
            title += f" in step {report.peak.nearest_trace.step}"
        total = table.total
        left = Remainder("all else", total, None)
        if isinstance(total, int):
            rest = total - sum(row.bytes for row in largest)
            left = Remainder("all else", rest, None)
        shown = model.ShareTable(total, tuple(largest), left)
        return Section(title, _shares(shown, "part", blocks=False))  # a card is narrow
    lines = report.top_lines
    why = lines.reason if isinstance(lines, Unavailable) else "no stack contains your code"
    return Section(title, (Line(f"unknown: {why}"),))


def _largest_named(table: model.ShareTable) -> list[model.ShareRow]:
    return [row for row in table.rows if row.bytes and not _is_nowhere(row)][:3]


def _holds_half(table: model.ShareTable, rows: Sequence[model.ShareRow]) -> bool:
    return not isinstance(table.total, int) or 2 * sum(row.bytes for row in rows) >= table.total


def largest_rows(table: model.ShareTable | Unavailable) -> list[tuple[str, int]]:
    """The three largest rows; one may be the unexplained rest."""
    if isinstance(table, Unavailable):
        return []
    rows = [(named(row.key), row.bytes) for row in table.rows]
    rest = table.remainder.bytes
    if isinstance(table, CategoryTable) and table.at == AT_STEP_END and isinstance(rest, int):
        rows.append(("not explained by named tensors", rest))
    return sorted((row for row in rows if row[1]), key=lambda row: -row[1])[:3]


# -- growth


def growth_sections(report: Report, *, full: bool) -> list[Section]:
    """Growth from step to step, and the lines whose memory stays."""
    found = []
    growth, leaks = report.growth, report.leaks
    if growth is not None:
        steps = f"from the end of step {growth.first_step} to the end of step {growth.last_step}"
        rate = f"{human_delta(growth.bytes_per_step)} per step"
        parts: list[Part] = [Line(f"{human_delta(growth.bytes)} {steps}: {rate}")]
        lines = growth.lines
        if lines is not None:
            rows = lines.rows if full else [row for row in lines.rows[:3] if row.bytes > 0]
            table = tuple(
                Row((change(row.bytes), _blocks(row.blocks), Cell(named(row.key), place=True)))
                for row in rows
            )
            foot = []
            if full and isinstance(lines.total, int) and isinstance(lines.remainder.bytes, int):
                what = f"({lines.remainder.what})"
                blocks = lines.remainder.blocks
                foot = [
                    Row((change(lines.remainder.bytes), _blocks(blocks), what)),
                    Row((change(lines.total), "", "total")),
                ]
            parts.append(Table("lines that grew", _CHANGES, table, tuple(foot), header=False))
        if report.holders:
            parts.append(Line("Containers that held tensors when they were last searched:", "item"))
            parts.append(_holders(report.holders if full else report.holders[:_FEW_HOLDERS]))
        found.append(Section("Growth", tuple(parts), "growth", "Growth"))
    if not isinstance(leaks, Unavailable) and leaks.rows:
        rows_ = tuple(
            Row(
                (
                    size(row.bytes),
                    Cell(f"{human_delta(row.bytes_per_step)} per step", row.bytes_per_step),
                    count(row.blocks),
                    Cell(named(row.key), place=True),
                    ", ".join(map(str, row.seen_in_steps)),
                )
            )
            for row in leaks.rows[: None if full else _FEW]
        )
        columns = (
            Column("bytes", 10, number=True),
            Column("per step", 0, gap=2, number=True, cut=False),
            Column("blocks", number=True),
            Column("line", 0, gap=2),
            Column("in steps"),
        )
        table_ = Table("lines that leak blocks", columns, rows_, header=False)
        over = plural(leaks.survive, "end") + " of a step"
        hint = (
            f"Blocks that outlived {over}, in {plural(leaks.steps, 'traced step')}; the ends of "
            f"the steps are from {leaks.boundaries}."
        )
        title = "Kept from step to step"
        found.append(Section(title, (table_,), "kept", "Kept", hint=hint))
    return found


def _holders(holders: Sequence[Holder]) -> Table:
    columns = (
        Column("bytes", 10, number=True),
        Column("tensors", 8, gap=1, number=True),
        Column("graphs", 8, gap=1, number=True),
        Column("saved", 10, gap=1, number=True),
        Column("container", 0, gap=2, cut=False),
    )
    rows = [
        Row(
            (
                size(one.bytes),
                Cell(f"{one.tensors:,}"),
                Cell(f"{one.graphs:,}"),
                size(one.saved_bytes),
                one.place,
            )
        )
        for one in holders
    ]
    return Table("containers", columns, tuple(rows))


_CHANGES = (
    Column("bytes", 10, number=True),
    Column("blocks", number=True),
    Column("line", 0, gap=9),
)


def _blocks(blocks: int | None) -> Cell | str:
    return "" if blocks is None else count(blocks)


# -- fragmentation

_SPACE = ("reserved", "allocated", "rounding", "free", "largest_hole")
_SPACE_MORE = ("pending", "returnable", "pinned", "segments")


def fragmentation_sections(report: Report, *, full: bool) -> list[Section]:
    """Fragmentation of reserved memory, at the peak and at the end, and the blocks that pin it."""
    found = report.fragmentation
    if isinstance(found, Unavailable):
        return []
    title = "Fragmentation"
    if found.step is not None and found.step != report.peak.step:
        title = f"Fragmentation in step {found.step}"
    layouts = {"peak": found.peak, "end": found.end}
    known = {name: one for name, one in layouts.items() if not isinstance(one, Unavailable)}
    moments = {"peak": "at peak allocated", "end": "at end"}
    rows = tuple(Row((moments[name], *_space(one.total))) for name, one in known.items())
    columns = (Column("", 17), *_space_columns())
    parts: list[Part] = [Table("how reserved memory was used", columns, rows)]
    parts += [
        Line(f"unknown ({one.reason})", "item", f"at the {name}")
        for name, one in layouts.items()
        if isinstance(one, Unavailable)
    ]
    parts += items(found.end.why_it_stays[:3])
    if full:
        parts += [_pools(name, one) for name, one in known.items() if len(one.pools) > 1]
        parts += [_pins(name, one) for name, one in known.items() if one.pins]
    hint = (
        "allocated + pending + free = reserved; rounding is inside allocated. Pinned: free, but "
        "in segments that also hold blocks in use, so it cannot be released to the driver. "
        "gpuprobe replay shows the same when reserved memory is highest, which is another moment."
    )
    return [Section(title, tuple(parts), "fragmentation", "Fragmentation", hint=hint)]


def _space_columns() -> tuple[Column, ...]:
    titles = (name.replace("_", " ") for name in _SPACE)
    return (
        *(Column(title, max(10, len(title)), number=True, gap=1) for title in titles),
        *(Column(name, number=True) for name in _SPACE_MORE),
    )


def _space(space: Space) -> tuple[Cell, ...]:
    figures = (size(getattr(space, name)) for name in (*_SPACE, *_SPACE_MORE[:-1]))
    return (*figures, count(space.segments))


def _pools(name: str, layout: Layout) -> Table:
    rows = tuple(
        Row((f"{pool.pool[0]}, {pool.pool[1]}", pool.segment_type, str(pool.stream), *_space(pool)))
        for pool in layout.pools
    )
    columns = (Column("pool"), Column("size class"), Column("stream", number=True))
    return Table(f"pools at the {name}", (*columns, *_space_columns()), rows)


def _pins(name: str, layout: Layout) -> Table:
    rows = tuple(
        Row(
            (
                size(pin.segment_bytes),
                size(pin.free),
                size(pin.held),
                count(pin.blocks),
                ", ".join(
                    f"{row.key} ({human_bytes(row.bytes)} in {_blocks_of(row.blocks)})"
                    for row in pin.lines
                ),
            )
        )
        for pin in layout.pins
    )
    columns = (
        *(Column(title, number=True) for title in ("segment", "free", "held by", "blocks")),
        Column("lines"),
    )
    return Table(f"segments that cannot be released at the {name}", columns, rows)


def _blocks_of(blocks: int | None) -> str:
    return "some blocks" if blocks is None else plural(blocks, "block")


# -- memory without tensors


def non_tensor_sections(report: Report, *, full: bool) -> list[Section]:
    """Other memory on the devices and pinned memory of the host, if it was read."""
    found = report.non_tensor_memory
    several = len(report.ranks) > 1
    parts: list[Part] = []
    devices = list(found.devices)
    if several and not full:  # of many ranks, the devices with the most other memory
        devices = sorted(devices, key=_not_torch, reverse=True)[:_FEW]
    for item in devices:
        of = f"rank {item.rank}, " if several else ""
        holds = [*_holds(item), *([f"{amount(item.reserved)} reserved by torch"] if full else [])]
        text = f"{of}{item.device}, step {item.step}: {', '.join(holds)}"
        parts.append(Line(text, "item"))
    if len(devices) < len(found.devices):
        parts.append(Line(f"… {len(found.devices) - len(devices)} more"))
    pinned = found.pinned
    if pinned is not None and pinned.in_use:
        held = "" if isinstance(pinned.held, Unavailable) else human_bytes(pinned.held)
        more = f", {held} held by torch" if held else ""
        of = f"rank {report.session.rank}, " if several else ""
        at = f", step {pinned.step}" if full else ""
        text = f"{of}pinned memory of the host{at}: {human_bytes(pinned.in_use)} in use{more}"
        if pinned.lines:
            asked = sum(line.bytes for line in pinned.lines)
            text += f"; the program requested {human_bytes(asked)}, rounded up"
        parts.append(Line(text, "item"))
        for line in pinned.lines[: None if full else _FEW_HOLDERS]:
            tensors = plural(line.tensors, "tensor")
            text = f"{human_bytes(line.bytes)} in {tensors} from {line.place}"
            parts.append(Line(text, "item", indent=4))
    if not parts:
        return []
    return [Section("Non-tensor memory", tuple(parts), "non-tensor", "Non-tensor")]


def _holds(item: DeviceUsage) -> Iterator[str]:
    if not isinstance(item.not_torch, Unavailable):
        yield (
            f"{amount(item.used)} in use, of which {human_bytes(item.not_torch)} outside torch "
            "(contexts, libraries, other processes)"
        )
    if not isinstance(item.inactive_split, Unavailable):
        yield f"{human_bytes(item.inactive_split)} of free parts in segments in use"


def _not_torch(item: DeviceUsage) -> int:
    return -1 if isinstance(item.not_torch, Unavailable) else item.not_torch
