"""The predicted time of a step."""

from __future__ import annotations

import math
import re
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
)

_LEAST: Final = 0.01  # of the step: smaller shares are not printed


def step_time_sections(
    time: StepTime | Unavailable,
    top: int,
    *,
    full: bool = False,
    cost: TrainingCost | None = None,
    ranks: int = 1,
) -> list[Section]:
    """The time of a step, what bounds it, and where it goes. ``top``: rows of each table; ``full``:
    also its work, and the sources of the prices; ``ranks``: of the job.
    """
    if isinstance(time, Unavailable):
        return [Section("Step time", (Line(f"not predicted: {time.reason}"),), "step-time")]
    parts: list[Part] = [Line(text, "item") for text in _sentences(time, ranks, full=full)]
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
    if full and time.by_thread:
        by_thread = _table("host thread", time.by_thread, time, top)
        sections.append(Section("Time of a step by host thread", (by_thread,), "step-time-thread"))
    if time.by_rank and (full or any(row.waits_ns >= _LEAST * row.ns for row in time.by_rank)):
        sections.append(
            Section("Time of a step by rank", (_rank_table(time, top),), "step-time-rank")
        )
    if full and time.sources:
        sections.append(Section("Prices", bulleted(time.sources), "step-time-prices"))
    return sections


def short_step_time(
    time: StepTime | Unavailable, *, cost: TrainingCost | None = None, ranks: int = 1
) -> list[Section]:
    """The time of a step and what bounds it, with the names of what it does not include."""
    if isinstance(time, Unavailable):
        return step_time_sections(time, 0)
    left_out = [_left_out(text) for text in time.left_out]
    (first, *_) = step_time_sections(replace(time, left_out=()), 0, cost=cost, ranks=ranks)
    if not left_out:
        return [first]
    text = f"not included: {'; '.join(left_out)} (-v: why)"
    return [replace(first, parts=(*first.parts, Line(text, "item")))]


def _left_out(text: str) -> str:
    """The name of what is left out, and the option that would include it."""
    name, _, reason = text.partition(": ")
    option = re.search(r"\((--[a-z-]+)\)", reason)
    return name if option is None else f"{name}, without {option.group(1)}"


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


def speed_text(time: StepTime, ranks: int = 1) -> str:
    """``13.5 ms (12.6 to 15.7 ms), predicted; 1,000 to 1,300 images a second``."""
    return "; ".join([f"{span_text(time)}, predicted", *_rates(time, ranks)])


def _rates(time: StepTime, ranks: int) -> list[str]:
    each = " on each rank" if ranks > 1 else ""
    return [
        f"{_number(low)} to {_number(high)} {name} a second{each}"
        for name, count in time.counted
        for low, high in (time.per_second(count),)
    ]


def _sentences(time: StepTime, ranks: int, *, full: bool) -> Iterator[str]:
    rates = _rates(time, ranks)
    used = time.used
    if not isinstance(used, Unavailable):
        low, high = (used * time.expected_ns / ns for ns in (time.high_ns, time.low_ns))
        span = f"{100 * low:.0f} to {high:.0%}" if high >= _LEAST else "less than 1%"
        rates.append(f"{span} of the GPU's peak (MFU)")
    if rates:
        yield ", ".join(rates)
    if not time.counted and isinstance(time.samples, Unavailable):
        yield f"samples a second are unknown: {time.samples.reason}"
    elif full and time.counted and time.counted[0][0] == "samples":
        yield f"samples: the {time.counted[0][1]:,} rows of the model's first input in a step"
    yield bounds_text(time)
    text = "prices are by models, none by measured kernels of this GPU"
    if round(100 * time.measured):
        rest = ", the rest by models" if time.measured < 1 else ""
        text = f"prices are by measured kernels of this GPU for {time.measured:.0%} of it{rest}"
    yield text if full else f"{text} (-v: sources)"


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
    per = counted_in(table.rows)
    columns = (
        Column("GPU", AUTO, cut=False),
        Column("needs, GiB", AUTO, gap=1, number=True),
        *speed_columns(per, costs=costs),
    )
    rows = [
        Row(
            (
                row.gpu,
                _NONE if row.failed else _needs(row),
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


def _needs(row: GpuRow) -> Cell:
    """``1.2 of 79.1``."""
    used, whole = (number / 2**30 for number in (row.total_high, row.capacity))
    return Cell(f"{used:,.1f} of {whole:,.1f}", row.total_high)


def _reasons(row: GpuRow) -> Iterator[str]:
    """Why a row has no figures, its verdict if the table does not have it, and what keeps the
    program from running there.
    """
    if row.no_kernels and not row.failed:
        yield row.no_kernels
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
    def gpu(self) -> str: ...
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
    def samples(self) -> int: ...
    @property
    def measured(self) -> float: ...
    @property
    def cost(self) -> TrainingCost | None: ...


def counted_in(rows: Sequence[Speed]) -> str:
    """What the speeds of a table are counted in: "images", "tokens" or "samples"."""
    for per in ("images", "tokens"):
        if any(getattr(row, per) for row in rows):
            return per
    return "samples"


def speed_columns(per: str, *, costs: bool) -> tuple[Column, ...]:
    """The columns of `speed_cells`. ``per``: see `counted_in`."""
    return (
        Column("step, with its range", AUTO, gap=2, number=True),
        Column(f"{per}/s", AUTO, gap=2, number=True),
        *((Column("cost", AUTO, gap=2, number=True),) if costs else ()),
    )


def speed_cells(row: Speed, *, costs: bool, ranks: int = 1, instead: str = "") -> tuple[Cell, ...]:
    """A step's time with its range, and the ranges of how much all ``ranks`` do in a second and of
    what that costs; or the text ``instead``.
    """
    if instead or not row.expected_ns:
        return (Cell(instead or "-", -1), _NONE, *((_NONE,) if costs else ()))
    count = (row.images or row.tokens or row.samples) * ranks
    low, expected, high = (
        count / (ns * 1e-9) for ns in (row.high_ns, row.expected_ns, row.low_ns or 1)
    )
    return (
        Cell(_short_span(row), row.expected_ns),
        Cell(f"{_short(low)} to {_short(high)}", expected) if count else _NONE,
        *((_cost_cell(row),) if costs else ()),
    )


_NS: Final = {"ns": 1, "µs": 1e3, "ms": 1e6, "s": 1e9}


def _short_span(row: Speed) -> str:
    """``13.5 ms (12.6 to 15.7)``, in the unit of the expected time."""
    expected = human_ns(row.expected_ns)
    unit = _NS[expected.rpartition(" ")[2]]
    digits = 0 if row.expected_ns >= 100 * unit else 1
    low, middle, high = (
        f"{ns / unit:,.{digits}f}" for ns in (row.low_ns, row.expected_ns, row.high_ns)
    )
    return f"{middle} {expected.rpartition(' ')[2]} ({low} to {high})"


def speed_notes(per: str, rows: Sequence[Speed]) -> list[Part]:
    """What the columns of speed mean, below the table."""
    notes: list[Part] = []
    costs = [row.cost for row in rows if row.cost is not None]
    if costs:
        unit = "a billion tokens" if per == "tokens" else f"a million {per}"
        notes.append(Line(f"cost: for {unit}, or for a step without any{_listed(costs[0])}"))
    own = [row.gpu for row in rows if row.expected_ns and round(100 * row.measured)]
    others = [row.gpu for row in rows if row.expected_ns and row.gpu not in own]
    texts = []
    if own:
        shares = [row.measured for row in rows if row.expected_ns and row.gpu in own]
        least, most = f"{100 * min(shares):.0f}", f"{max(shares):.0%}"
        span = most if most == f"{least}%" else f"{least} to {most}"
        texts.append(f"by measured kernels of the GPU for {span} of its time: {', '.join(own)}")
    if others:
        texts.append(f"by models and data sheets: {', '.join(others)}")
    if texts:
        text = f"times are predicted, {'; '.join(texts)}"
        notes.append(Line(f"{text} (gpuprobe estimate --gpu GPU -v: the sources)"))
    return notes


def _cost_cell(row: Speed) -> Cell:
    if row.cost is None:
        return _NONE
    low, high = next(
        ends
        for ends in (
            (row.cost.images_low, row.cost.images_high),
            (row.cost.tokens_low, row.cost.tokens_high),
            (row.cost.samples_low, row.cost.samples_high),
            (row.cost.step_low, row.cost.step_high),
        )
        if ends[1]
    )
    return Cell(f"{_money(low)} to {_money(high)}", high)


def _work_text(time: StepTime) -> str:
    """Which step it is, its work, and how long the host waits for it."""
    flops = f"{time.flops / 1e12:,.3g} TFLOP in products, attention and convolutions"
    text = f"step {time.step}: {human_ns(time.gpu_ns)} of work on the GPU, {flops}"
    if time.host_waits:
        calls = plural(time.host_waits, "call")
        text += f"; the host waits for it in {calls}, {human_ns(time.host_waits_ns)}"
    return text


def _cost_text(cost: TrainingCost) -> str:
    """What a step costs, and a billion tokens or a million images."""
    gpus = "a GPU" if cost.gpus == 1 else f"each of {cost.gpus} GPUs"
    texts = [f"{_money(cost.step_low)} to {_money(cost.step_high)} a step"]
    if cost.tokens_high:
        texts.append(f"{_money(cost.tokens_low)} to {_money(cost.tokens_high)} a billion tokens")
    if cost.images_high:
        texts.append(f"{_money(cost.images_low)} to {_money(cost.images_high)} a million images")
    if cost.samples_high:
        texts.append(f"{_money(cost.samples_low)} to {_money(cost.samples_high)} a million samples")
    return f"at {cost.price:,g} an hour for {gpus}{_listed(cost)}: {', '.join(texts)}"


def _listed(cost: TrainingCost) -> str:
    return f" (price list of {cost.date})" if cost.date else ""


def _money(value: float) -> str:
    digits = 2 if value >= 1 or not value else 1 - math.floor(math.log10(value))
    return f"{value:,.{digits}f}"


def _short(value: float) -> str:
    """At most four characters: ``154k``, ``1.3M``."""
    for unit, name in ((1e9, "G"), (1e6, "M"), (1e3, "k"), (1, "")):
        if value >= 0.9995 * unit:
            return f"{value / unit:.{0 if value >= 9.95 * unit else 1}f}{name}"
    return f"{value:.2g}"


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
