"""A check against a baseline, as text or Markdown."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, TextIO

from gpuprobe.analysis.baseline import CheckResult, MetricResult
from gpuprobe.analysis.compare.diff import DiffRow
from gpuprobe.model.text import human_bytes, human_delta, visible
from gpuprobe.reporters.terminal import Style

__all__ = ["markdown", "render", "write"]

_ROWS = 8


def write(result: CheckResult, stream: TextIO) -> None:
    """Write it to ``stream``."""
    stream.write("\n".join(render(result, Style.of(stream))) + "\n")


def _amount(metric: MetricResult, value: int) -> str:
    return human_bytes(value) if metric.unit == "bytes" else str(value)


def _change(metric: MetricResult) -> str:
    if metric.unit == "bytes":
        return human_delta(metric.delta)
    return f"{metric.delta:+d}" if metric.delta else "0"


def _verdict(result: CheckResult) -> str:
    if result.mismatches:
        return "the baseline is of another environment: not compared with confidence"
    count = len(result.regressions)
    if not count:
        return "memory is within the baseline"
    return f"{count} metric{'s' if count != 1 else ''} above the baseline"


def render(result: CheckResult, style: Style) -> Iterator[str]:
    """The lines of the check."""
    yield style.heading(_verdict(result))
    if result.cause and result.regressions:
        yield from style.wrapped(f"first cause: {result.cause}", first="  ", rest="    ")
        for text in other_causes(result):
            yield from style.wrapped(f"also: {text}", first="  ", rest="    ")
    for text in result.mismatches:
        yield from style.wrapped(text, first="  ! ", rest="    ")
    yield ""
    for metric in result.metrics:
        mark = "!" if metric.regressed else " "
        yield (
            f"{mark} {metric.name:<28}{_amount(metric, metric.before):>12}"
            f"{_amount(metric, metric.after):>12}{_change(metric):>12}"
        )
    moved = [metric for metric in result.phases if metric.delta]
    if moved:
        yield ""
        yield style.heading("Peak of each phase and kind of step")
        for metric in moved:
            mark = "!" if metric.regressed else " "
            yield (
                f"{mark} {style.fit(metric.name, 28):<28}{_amount(metric, metric.before):>12}"
                f"{_amount(metric, metric.after):>12}{_change(metric):>12}"
            )
    for table in _tables(result):
        yield ""
        yield style.heading(table.title)
        for row in table.rows[:_ROWS]:
            yield f"  {table.change(row.delta):>12}  {style.text(row.key)}"
        rest = sum(row.delta for row in table.rows[_ROWS:])
        if len(table.rows) > _ROWS:
            yield f"  {table.change(rest):>12}  ({len(table.rows) - _ROWS} more)"
        yield f"  {table.change(sum(row.delta for row in table.rows)):>12}  total"
    for text in result.cautions:
        yield from style.wrapped(text, first="note: ", rest="  ")
    told = told_by(result)
    if told:
        yield ""
        for text in told:
            yield from style.wrapped(text, rest="  ")


class _Table(NamedTuple):
    title: str
    rows: list[DiffRow]  # those that changed
    unit: str

    def change(self, delta: int) -> str:
        return human_delta(delta) if self.unit == "bytes" else f"{delta:+d}"


def _tables(result: CheckResult) -> Iterator[_Table]:
    """What changed, by line: of what is blamed first, then of the peak, which is shown by category
    and module too. Each sums to the change of what its title names."""
    peak = result.rows or {}
    first = next((item for item in result.regressions if item.rows), None)
    if first is not None and first.rows is not None and first.name != "peak_allocated":
        rows = [row for row in first.rows if row.delta]
        if rows and first.rows != peak.get("line"):
            what = _ACCOUNTS.get(first.name, f"at the peak of {first.name}")
            yield _Table(f"What changed {what}, by lines", rows, first.unit)
    for by, title in (("line", "lines"), ("category", "categories"), ("module", "modules")):
        rows = [row for row in peak.get(by, ()) if row.delta]
        if rows:
            yield _Table(f"What changed at the peak, by {title}", rows, "bytes")


_ACCOUNTS = {
    "growth_per_step": "in what the steps left behind",
    "steady_allocated": "in what is left after the last step",
    "peak_reserved": "in the segments taken from the driver",
    "device_allocs_after_warm_up": "in the calls of cudaMalloc",
    "implicit_syncs_per_step": "in the implicit synchronisations of the run",
    "races": "in the races",
}


def other_causes(result: CheckResult) -> list[str]:
    """What else grew, each for a reason of its own."""
    told = {"", *(item.place for item in result.regressions if item.cause == result.cause)}
    found = []
    for item in result.regressions:
        if item.place not in told:
            told.add(item.place)
            found.append(f"{item.name}: {item.cause}")
    return found


def told_by(result: CheckResult) -> list[str]:
    """What the check was told and by whom, in words; empty where nobody told it anything."""
    lines = []
    if result.settings:
        parts = [f"{item.name} {item.value} ({item.source})" for item in result.settings]
        lines.append(f"measured: {'; '.join(parts)}")
    chosen = [metric for metric in result.metrics if metric.source != "default"]
    if chosen:
        parts = [f"{metric.name} {metric.accepted} ({metric.source})" for metric in chosen]
        rest = "; others: defaults" if len(chosen) < len(result.metrics) else ""
        lines.append(f"accepted above the baseline: {'; '.join(parts)}{rest}")
    return lines


def markdown(result: CheckResult, stream: TextIO) -> None:
    """Write it for a job summary or a pull-request comment."""
    sign = "✅" if result.ok else "❌"
    stream.write(f"### {sign} gpuprobe: {_verdict(result)}\n\n")
    if result.cause and result.regressions:
        stream.write(f"**First cause:** `{_cell(result.cause)}`\n\n")
        for text in other_causes(result):
            stream.write(f"**Also:** `{_cell(text)}`\n\n")
    for text in result.mismatches:
        stream.write(f"- {_cell(text)}\n")
    stream.write("\n| metric | baseline | now | change |\n|---|--:|--:|--:|\n")
    for metric in (*result.metrics, *(item for item in result.phases if item.delta)):
        name = f"**{metric.name}**" if metric.regressed else metric.name
        stream.write(
            f"| {name} | {_amount(metric, metric.before)} | {_amount(metric, metric.after)} | "
            f"{_change(metric)} |\n"
        )
    for table in _tables(result):
        if table.title.endswith("lines"):
            stream.write(f"\n| change | {table.title[0].lower()}{table.title[1:]} |\n|--:|---|\n")
            for row in table.rows[:_ROWS]:
                stream.write(f"| {table.change(row.delta)} | `{_cell(row.key)}` |\n")
    for text in result.cautions:
        stream.write(f"\n- {_html(text)}\n")
    for text in told_by(result):
        stream.write(f"\n<sub>{_html(text)}</sub>\n")


def _cell(text: str) -> str:
    return visible(text).replace("|", "\\|").replace("`", "'")


def _html(text: str) -> str:
    """Text that Markdown leaves alone: it may hold file names."""
    return "".join(
        char if char.isalnum() or char in " /:;,()%=-" else f"&#{ord(char)};"
        for char in visible(text)
    )
