"""Results as HTML fragments for notebooks: parts of the report page, without its script.

Front ends differ in the HTML that they allow, so a fragment is plain HTML and SVG with one style
sheet, whose rules are all below the class ``gpuprobe``. The text colour is the notebook's, which
may differ from the browser's preference.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from gpuprobe.analysis.baseline.model import CheckResult
from gpuprobe.analysis.compare.diff import Diff
from gpuprobe.analysis.inspection.tracks import Track
from gpuprobe.model.machine.devices import Device, Inventory
from gpuprobe.model.memory import Category
from gpuprobe.model.report import Report
from gpuprobe.model.text import human_bytes, plural
from gpuprobe.model.values import Reading, Unavailable
from gpuprobe.reporters.html.draw import Drawing
from gpuprobe.reporters.html.markup import Markup, el
from gpuprobe.reporters.html.markup import Part as Content
from gpuprobe.reporters.html.report import asset
from gpuprobe.reporters.sections.check import check_sections
from gpuprobe.reporters.sections.parts import Column, Row, Section, Table, cell
from gpuprobe.reporters.sections.report import facts, outcome, report_sections
from gpuprobe.reporters.sections.report.memory import causes_section
from gpuprobe.reporters.sections.results import ROWS, diff_sections, sections_of
from gpuprobe.reporters.text.info import headline, verdict

T = TypeVar("T")

_POINTS = 600
_WIDTH, _HEIGHT = 1000, 130


class _Plain(Drawing):
    """Draws tables with their first rows, without sorting."""

    def table(self, table: Table) -> Markup:
        shown = [column.title for column in table.columns]
        rows = [self._row(table.columns, row) for row in table.rows[:ROWS]]
        left = len(table.rows) - ROWS
        if left > 0:
            rows.append(el("tr", el("td", f"and {plural(left, 'more row')}", colspan=len(shown))))
        head = [
            el("th", title, class_="n" if column.number else None)
            for title, column in zip(shown, table.columns, strict=True)
        ]
        return el(
            "table",
            el("thead", el("tr", head)) if any(shown) else None,
            el("tbody", rows),
            el("tfoot", [self._row(table.columns, row) for row in table.foot])
            if table.foot
            else None,
        )

    def _row(self, columns: Sequence[Column], row: Row) -> Markup:
        cells = [
            el("td", self._shown(column, cell(one), 0.0), class_="n" if column.number else None)
            for column, one in zip(columns, row.cells, strict=True)
        ]
        return el("tr", cells, el("td", row.note, class_="note") if row.note else None)

    def titled(self, section: Section) -> Markup:
        body = self.parts(section)
        return el("div", el("h5", section.title) if section.title else None, body)

    def figure(self, section: Section) -> Markup:
        figure = section.figure
        big = None
        if figure is not None:
            big = el("p", figure.text, class_=f"big {figure.tone}".strip())
        return el("div", el("h5", section.title), big, self.parts(section))


def of_report(report: Report, tracks: Sequence[Track] = ()) -> Markup:
    """The five lines, the peak with its causes and, if memory was traced, its curve."""
    draw = _Plain(report.session.cwd)
    found = {section.name: section for section in report_sections(report)}
    error = report.recording.error
    return _fragment(
        el("h4", report.recording.name),
        el("p", " · ".join([outcome(report), *facts(report)]), class_="note"),
        el("p", el("b", error.type), f": {error.located}", class_="banner") if error else None,
        *(el("p", f"not recorded: {text}", class_="note") for text in report.recording.missing),
        draw.parts(found["head"]),
        el(
            "div",
            draw.figure(found["peak"]),
            draw.titled(causes_section(report)),
            class_="cards",
        ),
        [_curve(track, several=len(tracks) > 1) for track in tracks[:4]] or _steps(report),
        draw.titled(found["categories"]),
        draw.titled(found["lines"]),
    )


def of_diff(diff: Diff) -> Markup:
    """The change of each peak, by lines and categories."""
    draw = _Plain()
    return _fragment(
        el("h4", "What changed"),
        el("p", f"{diff.before} → {diff.after}", class_="note"),
        [
            draw.figure(section) if section.figure else draw.titled(section)
            for section in diff_sections(diff)
        ],
    )


def of_check(result: CheckResult) -> Markup:
    """The verdict and the lines that grew."""
    draw = _Plain()
    first, *rest = check_sections(result, ROWS)
    return _fragment(
        el(
            "div",
            el("b", first.title),
            draw.parts(first),
            class_="banner ok" if result.ok else "banner",
        ),
        map(draw.titled, rest),
    )


def of_error(error: Exception) -> Markup:
    """An error, in place of the result."""
    return _fragment(el("p", el("b", type(error).__name__), f": {error}", class_="banner"))


def of_result(value: object) -> Markup:
    """Any other result. Raises TypeError for other objects."""
    if isinstance(value, Report):
        return of_report(value)
    if isinstance(value, Diff):
        return of_diff(value)
    if isinstance(value, CheckResult):
        return of_check(value)
    if isinstance(value, Inventory):
        return _fragment(
            el("h4", headline(value)), el("p", verdict(value)[1]), _devices(value.devices)
        )
    if isinstance(value, Device):
        return _fragment(_devices([value]))
    sections = sections_of(value)
    if not sections:
        raise TypeError(f"{type(value).__name__} has no HTML form")
    return _of_sections(sections)


def _of_sections(sections: Iterable[Section]) -> Markup:
    draw = _Plain()
    first, *rest = sections
    return _fragment(
        el("h4", first.title) if first.title else None, draw.parts(first), map(draw.titled, rest)
    )


def _devices(devices: Sequence[Device]) -> Markup | None:
    rows = [
        Row(
            (
                _shown(device.name, str),
                _shown(device.memory.used, human_bytes),
                _shown(device.memory.total, human_bytes),
                _shown(device.utilisation.gpu, "{} %".format),
                _shown(device.temperature.gpu, "{} °C".format),
                device.key,
            )
        )
        for device in devices
    ]
    columns = (
        Column("device"),
        Column("used", number=True),
        Column("memory", number=True),
        Column("busy", number=True),
        Column("temperature", number=True),
        Column("identity"),
    )
    return _Plain().table(Table("devices", columns, tuple(rows))) if rows else None


def _shown(reading: Reading[T], form: Callable[[T], str]) -> str:
    value = reading.value
    return "-" if isinstance(value, Unavailable) else form(value)


def _fragment(*parts: Content) -> Markup:
    style = asset("palette.css").replace(":root", ".gpuprobe") + asset("notebook.css")
    return el("div", el("style", Markup(style)), parts, class_="gpuprobe")


# -- curves


def _curve(track: Track, *, several: bool) -> Markup:
    """Allocated bytes over the allocator's events, in bands of categories, from the bottom up."""
    if not len(track):
        return Markup("")
    if len(track) > _POINTS:
        track.thinned(_POINTS)
    top = max(max(track.allocated), 1)
    first, last = track.at[0], max(track.at[-1], track.at[0] + 1)
    across = [(at - first) / (last - first) * _WIDTH for at in track.at]
    below = [0] * len(track)
    shapes, names = [], []
    for category, column in track.bands.items():
        if not any(column):
            continue
        above = [low + size for low, size in zip(below, column, strict=True)]
        edge = [*zip(across, above, strict=True), *zip(across[::-1], below[::-1], strict=True)]
        points = " ".join(f"{x:.1f},{_HEIGHT * (1 - y / top):.1f}" for x, y in edge)
        shapes.append(el("polygon", points=points, fill=f"var(--{category.value})"))
        names.append(category)
        below = above
    title = f"Memory over time: {plural(track.events, 'allocator event')}, up to {human_bytes(top)}"
    return el(
        "div",
        el("h5", f"{title} on {track.device}, rank {track.rank}" if several else title),
        _chart(shapes, f"highest {human_bytes(top)}"),
        _legend(names),
    )


def _steps(report: Report) -> Markup:
    """The peak of each step, for a recording without a curve."""
    here = (report.peak.rank, report.peak.device)
    peaks = []
    for row in report.steps.rows:
        for window in row.step.windows:
            if (row.rank, window.device) == here:
                peak = window.peak_allocated
                peaks.append(0 if isinstance(peak, Unavailable) else peak.at_most)
    if len(peaks) < 3 or not any(peaks):
        return Markup("")
    top, wide = max(peaks), _WIDTH / len(peaks)
    bars = [
        el(
            "rect",
            x=f"{index * wide:.1f}",
            y=f"{_HEIGHT * (1 - peak / top):.1f}",
            width=f"{wide * 0.8:.1f}",
            height=f"{_HEIGHT * peak / top:.1f}",
            class_="fill",
        )
        for index, peak in enumerate(peaks)
    ]
    return el(
        "div",
        el("h5", f"Peak of each of {plural(len(peaks), 'step')}, up to {human_bytes(top)}"),
        _chart(bars, f"highest {human_bytes(top)}"),
    )


def _chart(shapes: Sequence[Markup], label: str) -> Markup:
    return el(
        "svg",
        shapes,
        viewBox=f"0 0 {_WIDTH} {_HEIGHT}",
        preserveAspectRatio="none",
        class_="curve",
        role="img",
        aria_label=label,
    )


def _legend(categories: Sequence[Category]) -> Markup:
    return el(
        "div",
        [
            el(
                "span",
                el(
                    "svg",
                    el("rect", width=10, height=10, fill=f"var(--{category.value})"),
                    viewBox="0 0 10 10",
                ),
                category.words,
            )
            for category in categories
        ],
        class_="legend",
    )
