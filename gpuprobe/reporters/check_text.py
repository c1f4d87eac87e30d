"""A check against a baseline, as text or Markdown."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TextIO

from gpuprobe.analysis.baseline import CheckResult, MetricResult
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
    if result.rows is not None:
        for by, title in (("line", "lines"), ("category", "categories"), ("module", "modules")):
            rows = [row for row in result.rows[by] if row.delta]
            if not rows:
                continue
            yield ""
            yield style.heading(f"What changed at the peak, by {title}")
            for row in rows[:_ROWS]:
                yield f"  {human_delta(row.delta):>12}  {style.text(row.key)}"
            rest = sum(row.delta for row in rows[_ROWS:])
            if len(rows) > _ROWS:
                yield f"  {human_delta(rest):>12}  ({len(rows) - _ROWS} more)"
            yield f"  {human_delta(sum(row.delta for row in rows)):>12}  total"
    for text in result.cautions:
        yield from style.wrapped(text, first="note: ", rest="  ")
    told = told_by(result)
    if told:
        yield ""
        for text in told:
            yield from style.wrapped(text, rest="  ")


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
    for metric in result.metrics:
        name = f"**{metric.name}**" if metric.regressed else metric.name
        stream.write(
            f"| {name} | {_amount(metric, metric.before)} | {_amount(metric, metric.after)} | "
            f"{_change(metric)} |\n"
        )
    rows = [row for row in (result.rows or {}).get("line", ()) if row.delta]
    if rows:
        stream.write("\n| change at the peak | line |\n|--:|---|\n")
        for row in rows[:_ROWS]:
            stream.write(f"| {human_delta(row.delta)} | `{_cell(row.key)}` |\n")
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
