"""A diff as text: the change of the peak, then the rows that make it up, largest first."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TextIO

from gpuprobe.analysis.compare.diff import BY, Compared, Diff, DiffRow, PeakDiff
from gpuprobe.model.text import human_bytes, human_delta
from gpuprobe.model.values import Peak, Unavailable
from gpuprobe.reporters.terminal import Style

__all__ = ["render", "write"]

_TITLES = {"category": "By category", "module": "By module", "line": "By line"}
_AMOUNTS = 3 * 11 + 2  # three columns of amounts, and the gap to the name


def write(diff: Diff, stream: TextIO, by: tuple[str, ...] = BY, top: int = 15) -> None:
    """Write ``diff`` to ``stream``, in the characters and colours that it has."""
    stream.write("\n".join(render(diff, Style.of(stream), by, top)) + "\n")


def render(diff: Diff, style: Style, by: tuple[str, ...] = BY, top: int = 15) -> Iterator[str]:
    """The lines of the text. ``top`` rows per table; the rest is summed, never dropped."""
    yield style.heading(style.fit(f"before: {diff.before}", style.width))
    yield style.heading(style.fit(f"after:  {diff.after}", style.width))
    for peak in diff.peaks:
        yield ""
        yield from _peak(peak, style)
        if peak.compared is not None:
            yield from style.wrapped(_compared(*peak.compared), first="  ", rest="  ")
        for name in by:
            yield ""
            yield style.heading(_TITLES[name])
            rows = peak.rows[name]
            if isinstance(rows, Unavailable):
                yield from style.wrapped(f"not known: {rows.reason}", first="  ", rest="  ")
            else:
                yield from _table(rows, style, top)
    if not diff.peaks:
        yield "no peak was recorded on either side"
    if diff.cautions:
        yield ""
        yield style.heading("Mind")
        for caution in diff.cautions:
            yield from style.wrapped(caution, first="  ", rest="  ")


def _peak(peak: PeakDiff, style: Style) -> Iterator[str]:
    delta = peak.delta
    change = "change not known" if isinstance(delta, Unavailable) else human_delta(delta)
    text = (
        f"Peak on {peak.device} (rank {peak.rank}): {_amount(peak.before)} → "
        f"{_amount(peak.after)}, {change}"
    )
    yield from style.wrapped(text, rest="  ")
    if peak.phase_before or peak.phase_after:
        phases = f"in {peak.phase_before or 'no phase'}, then {peak.phase_after or 'no phase'}"
        if peak.phase_before == peak.phase_after:
            phases = f"in {peak.phase_after} both times"
        yield from style.wrapped(phases, first="  ", rest="  ")
    if isinstance(delta, Unavailable):
        yield from style.wrapped(delta.reason, first="  ", rest="  ")


def _compared(before: Compared, after: Compared) -> str:
    moments = " with ".join(
        ("the snapshot" if one.step is None else f"step {one.step}")
        + f" ({human_bytes(one.allocated)}, "
        + (f"{human_bytes(one.below_peak)} below its peak)" if one.below_peak else "its peak)")
        for one in (before, after)
    )
    change = human_delta(after.allocated - before.allocated)
    return f"not every peak has a trace: the rows compare {moments}, and add up to {change}"


def _amount(peak: Peak | Unavailable) -> str:
    if isinstance(peak, Unavailable):
        return "unknown"
    if peak.exact:
        return human_bytes(peak.at_least)
    return f"{human_bytes(peak.at_least)} to {human_bytes(peak.at_most)}"


def _table(rows: tuple[DiffRow, ...], style: Style, top: int) -> Iterator[str]:
    changed = [row for row in rows if row.delta or row.status != "same"]
    yield f"{'before':>11}{'after':>11}{'change':>11}"
    for row in changed[:top]:
        yield from _row(row, style)
    rest = changed[top:]
    if rest:
        before, after = sum(r.before for r in rest), sum(r.after for r in rest)
        yield _cells(before, after) + f"  ({len(rest)} more)"
    same = [row for row in rows if not row.delta and row.status == "same"]
    if same:
        amount = sum(row.before for row in same)
        yield _cells(amount, amount) + f"  ({len(same)} unchanged)"
    yield _cells(sum(r.before for r in rows), sum(r.after for r in rows)) + "  total"


def _row(row: DiffRow, style: Style) -> Iterator[str]:
    note = f" [{row.status}]" if row.status in ("added", "removed") else ""
    width = style.width - _AMOUNTS - len(note)
    yield _cells(row.before, row.after) + f"  {style.fit(row.key, width)}{note}"
    if row.moved_from:
        came = f"moved from {row.moved_from}"
        yield " " * _AMOUNTS + style.fit(came, style.width - _AMOUNTS)


def _cells(before: int, after: int) -> str:
    return f"{human_bytes(before):>11}{human_bytes(after):>11}{human_delta(after - before):>11}"
