"""The predicted time of a step."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final, Protocol

from gpuprobe.analysis.repeats import Repeated, time_groups
from gpuprobe.model.plans.estimate import NOT
from gpuprobe.model.plans.gpu_table import GpuRow, GpuTable
from gpuprobe.model.plans.step_time import StepTime, TimeShare, TrainingCost
from gpuprobe.model.text import human_ns, plural
from gpuprobe.model.values import Nanoseconds, Unavailable
from gpuprobe.reporters.sections.parts import (
    AUTO,
    Cell,
    Column,
    Line,
    Part,
    Row,
    Section,
    Table,
    bulleted,
    duration,
    size,
)

_LEAST: Final = 0.01  # of the step: smaller shares are not printed


def step_time_sections(
    time: StepTime | Unavailable, top: int, *, full: bool = False, cost: TrainingCost | None = None
) -> list[Section]:
    """The time of a step, what bounds it, and where it goes. ``top``: rows of each table; ``full``:
    also its work, and the sources of the prices.
    """
    if isinstance(time, Unavailable):
        return [Section("Step time", (Line(f"not predicted: {time.reason}"),), "step-time")]
    parts: list[Part] = [Line(text, "item") for text in _sentences(time)]
    if full:
        parts.append(Line(_work_text(time), "item"))
    if cost is not None:
        parts.append(Line(_cost_text(cost), "item"))
    parts += bulleted([f"not included: {text}" for text in time.left_out])
    sections = [Section(headline(time), tuple(parts), "step-time", "Step time")]
    for title, by, rows in (
        ("Time of a step by line", "line", time.by_line),
        ("Time of a step by kind of work", "kind", time.by_kind),
        ("Time of a step by module", "module", time.by_module),
        ("Time of a step by phase", "phase", time.by_phase),
    ):
        if all(row.name.startswith("(") for row in rows):
            continue  # such as a program whose modules are unknown
        sections.append(
            Section(title, (_table(by, rows, time, top),), f"step-time-{by}", f"Time by {by}")
        )
    if time.by_rank and (full or any(row.waits_ns >= _LEAST * row.ns for row in time.by_rank)):
        sections.append(
            Section("Time of a step by rank", (_rank_table(time, top),), "step-time-rank")
        )
    if full and time.sources:
        sections.append(Section("Prices", bulleted(time.sources), "step-time-prices"))
    return sections


def short_step_time(
    time: StepTime | Unavailable, *, cost: TrainingCost | None = None
) -> list[Section]:
    """The time of a step and what bounds it, with a count of what it does not include."""
    if isinstance(time, Unavailable):
        return step_time_sections(time, 0)
    left_out = time.left_out
    (first, *_) = step_time_sections(replace(time, left_out=()), 0, cost=cost)
    if not left_out:
        return [first]
    text = f"not included: {plural(len(left_out), 'part')} of the step (--verbose)"
    return [replace(first, parts=(*first.parts, Line(text, "item")))]


def headline(time: StepTime) -> str:
    """``Step time on h100-80gb: 13.5 ms (12.6 to 15.7 ms), predicted``."""
    return f"Step time on {time.gpu}: {span_text(time)}, predicted"


def span_text(time: StepTime) -> str:
    """The expected time with its range."""
    low, high = human_ns(time.low_ns), human_ns(time.high_ns)
    unit = high.rpartition(" ")[2]
    if low.endswith(f" {unit}"):
        low = low.rpartition(" ")[0]
    return f"{human_ns(time.expected_ns)} ({low} to {high})"


def speed_text(time: StepTime) -> str:
    """``13.5 ms (12.6 to 15.7 ms), predicted; 1,000 to 1,300 images a second``."""
    return "; ".join([f"{span_text(time)}, predicted", *_rates(time)])


def _rates(time: StepTime) -> list[str]:
    return [
        f"{_number(low)} to {_number(high)} {name} a second"
        for count, name in ((time.tokens, "tokens"), (time.images, "images"))
        if count
        for low, high in (time.per_second(count),)
    ]


def _sentences(time: StepTime) -> Iterator[str]:
    rates = _rates(time)
    used = time.used
    if not isinstance(used, Unavailable):
        rates.append(f"{used:.0%} of the GPU's peak (MFU)")
    if rates:
        yield ", ".join(rates)
    yield bounds_text(time)
    yield f"prices: {time.measured:.0%} by measured kernels of this GPU, the rest by models"


def bounds_text(time: StepTime) -> str:
    """``bound by memory bandwidth 73%, computing 27%``."""
    shares = [
        f"{row.name} {row.ns / time.expected_ns:.0%}"
        for row in time.bounds
        if row.ns >= _LEAST * time.expected_ns
    ]
    return f"bound by {', '.join(shares)}" if shares else "nothing bounds it"


def gpu_table_sections(table: GpuTable) -> list[Section]:
    """The GPUs, the best first, and why some have no time."""
    costs = any(row.cost is not None for row in table.rows)
    per = "images" if any(row.images for row in table.rows) else "tokens"
    columns = (
        Column("GPU", AUTO, cut=False),
        Column("needs", AUTO, gap=2, number=True),
        Column("of", AUTO, gap=1, number=True),
        *speed_columns(per, costs=costs),
    )
    rows = [
        Row(
            (
                row.gpu,
                *((_NONE, _NONE) if row.failed else (size(row.total_high), size(row.capacity))),
                *speed_cells(row, costs=costs, instead=_no_speed(row)),
            )
        )
        for row in table.rows
    ]
    parts: list[Part] = [Table("GPUs", columns, tuple(rows)), *speed_notes(per, table.rows)]
    reasons: dict[str, list[str]] = {}
    for row in table.rows:
        for reason in _reasons(row):
            reasons.setdefault(reason, []).append(row.gpu)
    parts += bulleted([f"{', '.join(gpus)}: {reason}" for reason, gpus in reasons.items()])
    fitting = sum(row.fits for row in table.rows)
    title = f"Fits on {fitting} of {len(table.rows)} GPUs"
    return [Section(title, tuple(parts), "gpus", "GPUs")]


def _reasons(row: GpuRow) -> Iterator[str]:
    """Why a row has no figures, and its verdict if the table does not have it."""
    if row.failed:
        yield row.failed
    elif row.verdict != NOT:
        if not row.fits:
            yield row.verdict
        if row.no_time:
            yield row.no_time


def _no_speed(row: GpuRow) -> str:
    """What the table has in place of a time: a GPU that does not hold the run has none."""
    if row.failed:
        return "no estimate"
    if row.verdict == NOT:
        return NOT
    return "" if row.expected_ns else "not predicted"


_NONE: Final = Cell("-", -1)


class Speed(Protocol):
    """A predicted step of a run in a table of choices: nanoseconds, 0 without a time."""

    @property
    def low_ns(self) -> int: ...
    @property
    def expected_ns(self) -> int: ...
    @property
    def high_ns(self) -> int: ...
    @property
    def tokens(self) -> int: ...
    @property
    def images(self) -> int: ...
    @property
    def cost(self) -> TrainingCost | None: ...


def speed_columns(per: str, *, costs: bool) -> tuple[Column, ...]:
    """The columns of `speed_cells`. ``per``: "images" or "tokens"."""
    return (
        Column("step, with its range", AUTO, gap=2, number=True),
        Column(f"{per}/s", AUTO, gap=2, number=True),
        *((Column("cost", AUTO, gap=2, number=True),) if costs else ()),
    )


def speed_cells(row: Speed, *, costs: bool, ranks: int = 1, instead: str = "") -> tuple[Cell, ...]:
    """A step's time with its range, how much all ``ranks`` do in a second, and what that costs;
    or the text ``instead``.
    """
    if instead or not row.expected_ns:
        return (Cell(instead or "-", -1), _NONE, *((_NONE,) if costs else ()))
    count = (row.images or row.tokens) * ranks
    rate = count / (row.expected_ns * 1e-9)
    return (
        Cell(_short_span(row), row.expected_ns),
        Cell(_number(rate), rate) if count else _NONE,
        *((_cost_cell(row),) if costs else ()),
    )


_NS: Final = {"ns": 1, "µs": 1e3, "ms": 1e6, "s": 1e9}


def _short_span(row: Speed) -> str:
    """``13.5 ms (12.6 to 15.7)``, in the unit of the expected time."""
    expected = human_ns(row.expected_ns)
    unit = _NS[expected.rpartition(" ")[2]]
    return f"{expected} ({row.low_ns / unit:,.1f} to {row.high_ns / unit:,.1f})"


def speed_notes(per: str, rows: Sequence[Speed]) -> list[Part]:
    """What the columns of speed mean, below the table."""
    notes: list[Part] = []
    costs = [row.cost for row in rows if row.cost is not None]
    if costs:
        unit = "a million images" if per == "images" else "a billion tokens"
        text = f"cost: for {unit}, or for a step without any, at the slow end of the range"
        notes.append(Line(f"{text}{_listed(costs[0])}"))
    notes.append(
        Line("times are predicted, with their ranges; gpuprobe estimate --gpu GPU has the sources")
    )
    return notes


def _cost_cell(row: Speed) -> Cell:
    if row.cost is None:
        return _NONE
    amount = row.cost.images_high or row.cost.tokens_high or row.cost.step_high
    return Cell(_money(amount), amount)


def _work_text(time: StepTime) -> str:
    """Which step it is, and its work."""
    flops = f"{time.flops / 1e12:,.3g} TFLOP in products, attention and convolutions"
    return f"step {time.step}: {human_ns(time.gpu_ns)} of work on the GPU, {flops}"


def _cost_text(cost: TrainingCost) -> str:
    """What a step costs, and a billion tokens or a million images."""
    gpus = "a GPU" if cost.gpus == 1 else f"each of {cost.gpus} GPUs"
    texts = [f"{_money(cost.step_low)} to {_money(cost.step_high)} a step"]
    if cost.tokens_high:
        texts.append(f"{_money(cost.tokens_low)} to {_money(cost.tokens_high)} a billion tokens")
    if cost.images_high:
        texts.append(f"{_money(cost.images_low)} to {_money(cost.images_high)} a million images")
    return f"at {_money(cost.price)} an hour for {gpus}{_listed(cost)}: {', '.join(texts)}"


def _listed(cost: TrainingCost) -> str:
    return f" (price list of {cost.date})" if cost.date else ""


def _money(value: float) -> str:
    digits = 2 if value >= 1 or not value else 2 - math.floor(math.log10(value))
    return f"{value:,.{digits}f}"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _table(by: str, shares: Sequence[TimeShare], time: StepTime, top: int) -> Table:
    columns = (
        Column("time", 10, number=True),
        Column("share", 6, gap=1, number=True),
        Column("calls", 7, gap=1, number=True),
        Column(by, 0, gap=2, cut=False),
    )
    groups = time_groups([row for row in shares if row.ns], by)
    rows = [_group(group, time, place=by == "line") for group in groups[:top]]
    foot = []
    if rest := [row for group in groups[top:] for row in group.members]:
        foot.append(_row(_sum(f"({len(rest)} more)", rest), time))
    return Table(f"time by {by}", columns, tuple(rows), tuple(foot))


def _rank_table(time: StepTime, top: int) -> Table:
    """The ranks that wait the most; those of a balanced job wait for as long."""
    columns = (
        Column("step", 10, number=True),
        Column("communicates", 12, gap=2, number=True),
        Column("waits for others", 16, gap=2, number=True),
        Column("share", 6, gap=1, number=True),
        Column("rank", 0, gap=2, cut=False),
    )
    ranked = sorted(time.by_rank, key=lambda row: -row.waits_ns)
    rows = [
        Row(
            (
                duration(row.ns),
                duration(row.communication_ns),
                duration(row.waits_ns),
                Cell(f"{row.waits_ns / row.ns:.0%}" if row.ns else "", row.waits_ns),
                Cell(str(row.rank), row.rank),
            )
        )
        for row in ranked[:top]
    ]
    more = len(ranked) - len(rows)
    foot = [Row((*[Cell("", 0)] * 4, Cell(f"({more} more)", 0)))] if more else []
    return Table("time by rank", columns, tuple(rows), tuple(foot))


def _sum(name: str, rows: Sequence[TimeShare]) -> TimeShare:
    ns = Nanoseconds(sum(row.ns for row in rows))
    return TimeShare(name, ns, sum(row.calls for row in rows))


def _group(group: Repeated[TimeShare], time: StepTime, *, place: bool) -> Row:
    members = group.members if len(group.members) > 1 else ()
    row = _row(_sum(group.name, group.members), time, place=place, times=len(group.members))
    return replace(row, members=tuple(_row(one, time, place=place) for one in members))


def _row(row: TimeShare, time: StepTime, *, place: bool = False, times: int = 1) -> Row:
    share = row.ns / time.expected_ns if time.expected_ns else 0.0
    return Row(
        (
            duration(row.ns),
            Cell(f"{share:.0%}", share),
            Cell(f"{row.calls:,}" if row.calls else "", row.calls),
            Cell(row.name, place=place, times=times),
        )
    )
