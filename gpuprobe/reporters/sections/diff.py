"""A diff: the change of each peak, and its rows, the largest first."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from gpuprobe.analysis.compare.diff import (
    BY,
    Compared,
    Diff,
    DiffRow,
    PeakDiff,
    rows_by_need,
)
from gpuprobe.analysis.compare.times import MeasuredStepTime
from gpuprobe.analysis.repeats import change_groups
from gpuprobe.model.plans.step_time import LINKS, RANKS
from gpuprobe.model.text import human_bytes, human_delta, human_ns, plural
from gpuprobe.model.values import ReadStatus, Unavailable
from gpuprobe.reporters.sections.parts import (
    Cell,
    Column,
    Line,
    Part,
    Row,
    Section,
    Table,
    bulleted,
    change,
    duration,
    named,
    paragraphs,
    peak_text,
    size,
)
from gpuprobe.reporters.sections.step_time import bounds_text, span_text

_TITLES = {
    "category": "By category",
    "module": "By module",
    "line": "By line",
    "need": "By what it is needed for",
}


def diff_sections(diff: Diff, by: Iterable[str] = BY, top: int = 15) -> list[Section]:
    """The diff. ``top``: rows per table; the other rows are summed."""
    names = (Line(f"before: {diff.before}", "heading"), Line(f"after:  {diff.after}", "heading"))
    return [
        Section(parts=names, name="names"),
        *peak_sections(diff, by, top),
        *compiled_section(diff, top),
        *measured_time_section(diff),
        *caution_section(diff.cautions),
    ]


def peak_sections(diff: Diff, by: Iterable[str] = BY, top: int = 15) -> list[Section]:
    """Each peak with its tables. That of needs is left out if neither run traced the uses of
    memory, unless it is the only one.
    """
    by = tuple(by)
    found = []
    for index, peak in enumerate(diff.peaks):
        suffix = f"-{index}" if index else ""
        found.append(_peak(peak, f"peak{suffix}"))
        for name in by:
            rows = peak.rows[name]
            if name == "need" and len(by) > 1 and _not_collected(rows):
                continue
            part = _changes(rows, name, top)
            found.append(
                Section(_TITLES[name], (part,), f"by-{name}{suffix}", _TITLES[name])
            )  # fmt: skip
    if not diff.peaks:
        text = "neither side has a recorded peak"
        found.append(Section(parts=(Line(text, indent=0),), name="peak"))
    return found


def _not_collected(rows: tuple[DiffRow, ...] | Unavailable) -> bool:
    return isinstance(rows, Unavailable) and rows.status is ReadStatus.NOT_COLLECTED


def compiled_section(diff: Diff, top: int = 15) -> list[Section]:
    """The compilations of torch.compile on each side, ``top`` of each, those on only one side
    first. Empty without any.
    """
    if not any(diff.compiled):
        return []
    parts: list[Part] = []
    for name, own, other in zip(
        ("before", "after"), diff.compiled, diff.compiled[::-1], strict=True
    ):
        texts = sorted(own, key=lambda text: text in other)
        more = [f"({len(texts) - top} more)"] if len(texts) > top else []
        shown = [*texts[:top], *more] or ["nothing was compiled"]
        parts.append(Line(f"{name}:", indent=0))
        parts.extend(bulleted(shown))
    return [Section("Compiled", tuple(parts), "compiled", "Compiled")]


def measured_time_section(diff: Diff) -> list[Section]:
    """The predicted and the measured time of a step, and where they differ."""
    time = diff.step_time
    if time is None:
        return []
    title = "Step time, predicted and measured"
    if isinstance(time, Unavailable):
        parts: tuple[Part, ...] = (Line(f"not predicted: {time.reason}"),)
        return [Section(title, parts, "step-time", title)]
    gap = time.measured_ns / time.predicted.expected_ns - 1
    where = "in" if time.inside else "outside of"
    lines: list[Part] = [
        Line(f"predicted {span_text(time.predicted)}, {bounds_text(time.predicted)}", "item"),
        Line(
            f"measured {human_ns(time.measured_ns)} on {time.gpu} "
            f"(median of {plural(time.steps, 'step')}): {gap:+.0%}, {where} the range",
            "item",
        ),
    ]
    if time.data_ns:
        waits = f"{human_ns(time.data_ns)} of a step wait for data, which is not predicted"
        lines.append(Line(waits, "item"))
    exposed = time.predicted.bound_by(LINKS) + time.predicted.bound_by(RANKS)
    if time.collectives_ns or exposed:
        blocked = f"collectives block the host for {human_ns(time.collectives_ns)} of a step"
        text = f"{blocked}; predicted: {human_ns(exposed)} with nothing to compute meanwhile"
        lines.append(Line(text, "item"))
    lines += [Line(text, "item") for text in (_waits_text(time), _clock_text(time), _UNKNOWN)]
    if not time.inside and not time.phases:
        lines.append(Line("where they differ is unknown: no times on the GPU were recorded"))
    if time.phases:
        lines.append(_phase_table(time))
    return [Section(title, tuple(lines), "step-time", title)]


_UNKNOWN = (
    "unknown of the measured run: how long it waits for launches, and the time of each kernel"
)


def _waits_text(time: MeasuredStepTime) -> str:
    """``the host waits for the GPU in 2 calls of a step, 12.0 ms (Tensor.item() 1, …)``."""
    calls = plural(time.predicted.host_waits, "call")
    predicted = f"predicted: {calls}, {human_ns(time.predicted.host_waits_ns)}"
    if isinstance(time.waits, Unavailable):
        return f"synchronisations of the measured run: {time.waits.reason}; {predicted}"
    each = [f"{wait.call} {wait.count / time.steps:.3g}" for wait in time.waits]
    count = sum(wait.count for wait in time.waits) / time.steps
    ns = sum(wait.ns for wait in time.waits) // time.steps
    listed = f" ({', '.join(each)})" if each else ""
    return (
        f"the host waits for the GPU in {count:.3g} calls of a step, {human_ns(ns)}{listed}, "
        f"without reads such as float(tensor); {predicted}"
    )


def _clock_text(time: MeasuredStepTime) -> str:
    """``clock of the multiprocessors: 1,590 to 1,755 MHz, …``."""
    clock = time.clock
    if isinstance(clock, Unavailable):
        return f"clocks of the GPU, which heat and power limit: {clock.reason}"
    text = (
        f"clock of the multiprocessors: {clock.low:,} to {clock.high:,} MHz, median "
        f"{clock.median:,} ({plural(clock.readings, 'reading')}), "
        f"{clock.median / clock.sheet:.0%} of the data sheet's {clock.sheet:,}"
    )
    if clock.kept:
        low, high = clock.kept
        text += f"; prices assume that {100 * low:.0f} to {high:.0%} are kept under load"
    if clock.slowed:
        text += f"; limited by {', '.join(f'{why} ({count})' for why, count in clock.slowed)}"
    return text


def _phase_table(time: MeasuredStepTime) -> Table:
    columns = (
        Column("phase", 24),
        Column("predicted", 12, number=True),
        Column("on the GPU", 12, number=True),
        Column("longer by", 12, number=True),
    )
    rows = [
        Row(
            (
                one.phase,
                duration(one.predicted_ns),
                duration(one.measured_ns),
                _longer(one.measured_ns - one.predicted_ns),
            )
        )
        for one in time.phases
    ]
    return Table("step time by phase", columns, tuple(rows))


def _longer(ns: int) -> Cell:
    return Cell(f"{'-' if ns < 0 else ''}{human_ns(abs(ns))}", ns)


def caution_section(cautions: Sequence[str]) -> list[Section]:
    """Reasons why the comparison is not exact."""
    return [Section("Mind", paragraphs(cautions), "mind", "Mind")] if cautions else []


def _peak(peak: PeakDiff, name: str) -> Section:
    delta = peak.delta
    known = not isinstance(delta, Unavailable)
    moved = "change unknown" if isinstance(delta, Unavailable) else human_delta(delta)
    label = f"Peak on {peak.device} (rank {peak.rank})"
    before, after = (peak_text(side, "unknown") for side in (peak.before, peak.after))
    parts: list[Part] = [Line(f"{before} → {after}, {moved}", "item", label, indent=0)]
    if peak.phase_before or peak.phase_after:
        phases = f"in {peak.phase_before or 'no phase'}, then {peak.phase_after or 'no phase'}"
        if peak.phase_before == peak.phase_after:
            phases = f"in {peak.phase_after} both times"
        parts.append(Line(phases))
    if isinstance(delta, Unavailable):
        parts.append(Line(delta.reason))
    if peak.compared is not None:
        parts.append(Line(_compared(*peak.compared)))
    figure = change(delta) if known else None  # type: ignore[arg-type]
    return Section("", tuple(parts), name, label, figure=figure)


def _compared(before: Compared, after: Compared) -> str:
    sides = " with ".join(
        ("the snapshot" if one.step is None else f"step {one.step}")
        + f" ({human_bytes(one.allocated)}, "
        + (f"{human_bytes(one.below_peak)} below its peak)" if one.below_peak else "its peak)")
        for one in (before, after)
    )
    total = human_delta(after.allocated - before.allocated)
    return f"some peaks have no trace: the rows compare {sides}, and add up to {total}"


def _changes(rows: tuple[DiffRow, ...] | Unavailable, by: str, top: int) -> Part:
    if isinstance(rows, Unavailable):
        return Line(f"unknown: {rows.reason}")
    if by == "need":
        return _needs(rows)
    changed = [row for row in rows if row.delta or row.status != "same"]
    same = [row for row in rows if not row.delta and row.status == "same"]
    groups = change_groups(changed, by)
    most = max((abs(sum(row.delta for row in group.members)) for group in groups), default=0)

    def shown(name: str, members: Sequence[DiffRow]) -> Row:
        first, times = members[0], len(members)
        note = first.status if first.status in ("added", "removed") else ""
        cell_ = Cell(named(name), place=True, note=note, times=times)
        before, after = sum(row.before for row in members), sum(row.after for row in members)
        line = _cells(before, after, cell_, (after - before) / most if most else 0.0)
        moved = f"moved from {first.moved_from}" if first.moved_from else ""
        inside = tuple(shown(row.key, (row,)) for row in members) if times > 1 else ()
        return Row(line.cells, note=moved, members=inside)

    foot = []
    more = [row for group in groups[top:] for row in group.members]
    for rest, text in ((more, "more"), (same, "unchanged")):
        if rest:
            before, after = sum(row.before for row in rest), sum(row.after for row in rest)
            foot.append(_cells(before, after, f"({len(rest)} {text})"))
    shown_rows = [shown(group.name, group.members) for group in groups[:top]]
    return _table(by, shown_rows, [*foot, _total(rows)])


def _needs(rows: Sequence[DiffRow]) -> Table:
    """The changes by need, each with the line of which most of it is."""
    needs = rows_by_need(rows)
    most = max((abs(sum(row.delta for row in some)) for some in needs.values()), default=0)
    found = []
    for need, some in needs.items():
        before, after = sum(row.before for row in some), sum(row.after for row in some)
        share = (after - before) / most if most else 0.0
        line = _cells(before, after, need.label, share)
        found.append(Row(line.cells, note=most_of(some)))
    return _table("need", found, [_total(rows)])


def most_of(rows: Sequence[DiffRow]) -> str:
    """The line with the largest change of some rows in words; empty if none changed."""
    first = max(rows, key=lambda row: abs(row.delta))
    return f"{human_delta(first.delta)} made by {named(first.key)}" if first.delta else ""


def _cells(before: int, after: int, name: Cell | str, share: float | None = None) -> Row:
    delta = after - before
    bar = Cell("", delta, share=share)
    return Row((size(before), size(after), change(delta), bar, name))


def _total(rows: Sequence[DiffRow]) -> Row:
    return _cells(sum(row.before for row in rows), sum(row.after for row in rows), "total")


def _table(by: str, rows: Sequence[Row], foot: Sequence[Row]) -> Table:
    return Table(
        f"changes by {by}",
        (
            *(Column(title, 11, number=True) for title in ("before", "after", "change")),
            Column("", bar=True),
            Column(by, 0, gap=2, head=False),
        ),
        tuple(rows),
        tuple(foot),
        indent=0,
        note_indent=3 * 11 + 2,
    )
