"""A watch for hazards as text, with the lines of source that it is about."""

from __future__ import annotations

import linecache
from collections.abc import Iterator
from typing import TextIO

from gpuprobe.hazards.known import Comparison
from gpuprobe.hazards.results import Hazards, SyncRow
from gpuprobe.hazards.rules import SELF_WAIT
from gpuprobe.model.findings import Finding
from gpuprobe.model.place import Place
from gpuprobe.reporters.terminal import Style

__all__ = ["render", "write"]

_MOST = 20


def write(hazards: Hazards, stream: TextIO, cwd: str = "") -> None:
    """Write it to ``stream``; paths below ``cwd`` are shown relative to it."""
    style = Style.of(stream, cwd=cwd)
    stream.write("\n".join(render(hazards, style)) + "\n")


def render(hazards: Hazards, style: Style) -> Iterator[str]:
    """The lines of the report."""
    races = hazards.races
    comparison = hazards.comparison
    if races:
        yield style.heading(_count(len(races), "stream hazard"))
        if comparison is not None:
            new = [race for race in races if any(race is item for item in comparison.new)]
            yield f"  {len(new)} new, {len(races) - len(new)} in the baseline"
            races = new
    elif not hazards.operations:
        yield style.heading("Nothing to judge: the program launched nothing on a GPU")
    else:
        yield style.heading(f"No stream hazards among {hazards.operations} operations")
        yield "  in what could be seen: what could not is listed below"
    for finding in races[:_MOST]:
        yield ""
        yield from _finding(finding, style)
    if len(races) > _MOST:
        yield f"and {len(races) - _MOST} more (all of them in the JSON document)"
    if comparison is not None and comparison.gone:
        yield ""
        yield style.heading("In the baseline, and not found this time")
        for gone in comparison.gone[:_MOST]:
            yield f"  {style.text(f'{gone.rule} {gone.kind}  {gone.where}  {gone.about}')}"
    rows = sorted((row for row in hazards.syncs if not row.allowed), key=lambda row: -row.count)
    if rows:
        yield ""
        yield style.heading("The host waits for the GPU at")
        for row in rows[:_MOST]:
            where = "an unknown line" if row.location is None else _where(row.location, style)
            mark = "  (new)" if _is_new(row, comparison) else ""
            yield f"  {row.count:>5} x  {where}  {row.reason}{mark}"
            if row.replacement:
                yield from style.wrapped(row.replacement, first="           ", rest="           ")
    if hazards.redundant:
        yield ""
        yield style.heading("Waits without which everything is still in order")
        for place, count in hazards.redundant[:_MOST]:
            where = "an unknown line" if place is None else _where(place, style)
            yield f"  {count:>5} x  {where}"
    if hazards.self_waits:
        yield ""
        yield style.heading("A stream waits for itself, which orders nothing")
        for place in hazards.self_waits[:_MOST]:
            yield f"  {'an unknown line' if place is None else _where(place, style)}"
        yield from style.wrapped(
            f"{SELF_WAIT.id}: {SELF_WAIT.remedy}", first="      ", rest="      "
        )
    if hazards.coverage:
        yield ""
        yield style.heading("What this could not see")
        for line in hazards.coverage:
            yield from style.wrapped(line, first="  - ", rest="    ")


def _is_new(row: SyncRow, comparison: Comparison | None) -> bool:
    """Whether a line of the ledger is not in the baseline."""
    return comparison is not None and any(
        finding.subject == row.reason and finding.location == row.location
        for finding in comparison.new
    )


def _count(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def _finding(finding: Finding, style: Style) -> Iterator[str]:
    where = "" if finding.location is None else f"  {_where(finding.location, style)}"
    yield f"{finding.rule} {finding.kind}{where}"
    yield from style.wrapped(finding.message, first="  ", rest="  ")
    for place in (*finding.related, *((finding.location,) if finding.location else ())):
        source = linecache.getline(place.file, place.line).strip()
        if source:
            yield f"    {place.line:>5} | {style.text(source)}"
    if finding.fix is not None:
        yield from style.wrapped(f"fix: {finding.fix.text}", first="  ", rest="       ")
        for line in finding.fix.code.splitlines():
            yield f"       {style.text(line)}"
    verified = dict(finding.evidence).get("fix verified")
    if verified:
        yield from style.wrapped(
            f"verified: {verified.removeprefix('yes: ')}", first="       ", rest="       "
        )


def _where(place: Place, style: Style) -> str:
    return style.text(f"{style.path(place.file)}:{place.line}")
