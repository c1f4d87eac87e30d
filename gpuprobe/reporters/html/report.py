"""HTML pages that need nothing else, no network and no library: the report of a recording, and a
diff. Each page contains the JSON document of its result.

Text and tables are plain HTML, so that they work without JavaScript, on paper and with a screen
reader. Charts (curves, treemap, flame graph) are drawn by the page's script from data in the page.

Recorded text is not trusted: it is made visible and escaped (`markup`), data is JSON without ``<``,
and a content security policy allows only the page's own style and script, by their hashes.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from importlib.resources import files
from typing import IO, Any

from gpuprobe._version import __version__
from gpuprobe.analysis.compare.diff import Diff
from gpuprobe.analysis.inspection.tracks import Track
from gpuprobe.analysis.peak.flame import FlameNode
from gpuprobe.model.report import Report, Steps, cut_to
from gpuprobe.model.run.recording import StepRows
from gpuprobe.model.text import human_bytes, human_delta, plural
from gpuprobe.model.values import Peak, Unavailable
from gpuprobe.reporters.html.course import Courses, course
from gpuprobe.reporters.html.data import step_columns, track_data, tree_data
from gpuprobe.reporters.html.draw import Drawing
from gpuprobe.reporters.html.markup import Markup, Part, el, join, script_json
from gpuprobe.reporters.html.markup import Part as Content
from gpuprobe.reporters.json import diff as diff_json
from gpuprobe.reporters.json import report as report_json
from gpuprobe.reporters.sections.diff import caution_section, compiled_section, peak_sections
from gpuprobe.reporters.sections.parts import Line, Section, peak_text
from gpuprobe.reporters.sections.report import MOST_FINDINGS, facts, outcome, report_sections
from gpuprobe.reporters.sections.report.memory import causes_section

ROWS = 400
"""Rows, and groups of rows, of the tables of lines and modules."""

_SCRIPTS = ("base.js", "blocks.js", "timeline.js", "trees.js", "main.js")
_IN_CARDS = ("head", "recording", "peak", "advice")

Trees = dict[str, FlameNode]


def data_of(
    report: Report, tracks: Sequence[Track] = (), trees: Trees | None = None
) -> dict[str, Any]:
    """The data of the charts and, under ``report``, the report's document, with the findings shown;
    the rows of its steps are in separate columns (``steps``).
    """
    rows = report.steps.rows
    shown = replace(
        report,
        top_lines=cut_to(report.top_lines, ROWS, "lines"),
        top_modules=cut_to(report.top_modules, ROWS, "modules"),
        steps=Steps(report.steps.highlights, StepRows()),
        findings=report.findings[:MOST_FINDINGS],
    )
    document = report_json.to_document(shown)
    del document["steps"]["rows"]
    return {
        "report": document,
        "tracks": track_data(tracks),
        "trees": {name: tree_data(tree) for name, tree in (trees or {}).items()},
        "steps": step_columns(rows),
    }


def write(
    report: Report,
    stream: IO[str],
    *,
    tracks: Sequence[Track] = (),
    trees: Trees | None = None,
    problems: Sequence[str] = (),
    courses: Courses | None = None,
) -> None:
    """Write the page of a recording to a text stream (UTF-8).

    ``report`` has whole tables, of which `ROWS` rows are shown; ``tracks`` and ``problems`` are
    from `gpuprobe.analysis.inspection.tracks.tracks`. ``trees`` are those of the peak: treemaps by
    the name of their division, and the flame graphs ``stacks`` and ``all frames``. ``courses``: of
    a predicted step.
    """
    data = data_of(report, tracks, trees)
    draw = Drawing(report.session.cwd)
    sections = report_sections(report, full=True, problems=problems, top=ROWS)
    found = {section.name: section for section in sections}
    charts = {"step-time": course(courses or {})}
    if len(report.steps.rows) > 2 and data["steps"]:
        charts["steps"] = el("div", class_="chart", data_chart="steps")
    body: list[Content] = [
        _answer(report, found, draw),
        timeline_section(data["tracks"]),
        peak_section(data["trees"]),
    ]
    body += [
        draw.section(section, charts.get(name))
        for name, section in found.items()
        if name not in _IN_CARDS
    ]
    page(
        stream,
        title=report.recording.name,
        subtitle=" · ".join([outcome(report), *facts(report)]),
        body=body,
        data=data,
    )


# -- the answer


def _answer(report: Report, found: dict[str, Section], draw: Drawing) -> Markup:
    """The beginning of the page: the peak, its place, its causes, and advice."""
    error = report.recording.error
    banner = None
    if error is not None:
        of = f" (rank {error.rank})" if len(report.ranks) > 1 else ""
        banner = el("p", el("b", error.type), f": {error.located}{of}", class_="banner")
    missing = report.recording.missing
    cards = [
        draw.card(found["peak"]),
        draw.card(causes_section(report)),
        _advice(found["advice"], draw),
    ]
    tiles = [el("div", el("dt", name), el("dd", value)) for name, value in _figures(report)]
    return el(
        "section",
        banner,
        draw.card(found["head"]),
        *(el("p", el("b", "not recorded"), f": {text}", class_="banner") for text in missing),
        el("div", cards, class_="cards"),
        el("dl", tiles, class_="tiles") if tiles else None,
        id="answer",
        aria_label="the answer",
    )


def _advice(section: Section, draw: Drawing) -> Markup:
    """The first pieces of advice; the rest is collapsed."""
    starts = [
        index
        for index, part in enumerate(section.parts)
        if isinstance(part, Line) and part.kind == "numbered"
    ]
    cut = starts[1] if len(starts) > 1 else len(section.parts)
    first = Section(section.title, section.parts[:cut])
    others = None
    if len(starts) > 1:
        rest = draw.parts(Section(parts=section.parts[cut:]))
        label = plural(len(starts) - 1, "more suggestion")
        others = el("details", el("summary", label), rest)
    return draw.card(first, others)


def _figures(report: Report) -> list[tuple[str, str]]:
    """The key figures."""
    found = []
    peak = report.peak
    if isinstance(peak.reserved, Peak):
        found.append(("peak reserved", peak_text(peak.reserved)))
    cut = report.fragmentation
    if not isinstance(cut, Unavailable) and not isinstance(cut.peak, Unavailable):
        of = "at the peak" if cut.step in (None, peak.step) else f"in step {cut.step}"
        found.append((f"reserved, unused {of}", human_bytes(cut.peak.total.free)))
    for row in report.devices:
        end = row.end.allocated
        here = (row.rank, row.device) == (peak.rank, peak.device)
        if here and not isinstance(end, Unavailable):
            found.append(("allocated at the end", human_bytes(end)))
    if report.growth is not None:
        found.append(("growth per step", human_delta(report.growth.bytes_per_step)))
    if isinstance(peak.host_rss, Peak) and peak.measure != "host_rss":
        found.append(("peak of host memory", peak_text(peak.host_rss)))
    failures = len(report.out_of_memory) + report.earlier_failures
    if failures:
        found.append(("out of memory", plural(failures, "time")))
    return found


# -- charts


def timeline_section(tracks: Sequence[dict[str, Any]]) -> Markup:
    """The section of the curves; empty if no memory was traced."""
    if not tracks:
        return Markup("")
    events = sum(track["events"] for track in tracks)
    hint = f"{events:,} allocator events."
    if not all(track["complete"] for track in tracks):
        hint += " Drawn from fewer points, keeping the highs and lows of each interval."
    if any(track["phases"]["from"] == "stacks" for track in tracks):
        hint += " Phases are derived from the stacks."
    section = Section("Memory over time", (), "timeline", "Timeline", hint)
    return Drawing().section(section, el("div", class_="chart", data_chart="timeline"))


def peak_section(trees: dict[str, Any]) -> Markup:
    """The section of treemap and flame graph."""
    if not trees:
        return Markup("")
    hint = "Areas and widths are bytes. Click or press Enter to zoom in, Escape to go back."
    return Drawing().section(
        Section("Live at the peak", (), "live", "Live", hint),
        el("div", class_="treemap", data_tree="treemap"),
        el("h3", "By call stack"),
        el("div", class_="flame", data_tree="flame"),
    )


def page(
    stream: IO[str], *, title: str, subtitle: str, body: Sequence[Content], data: dict[str, Any]
) -> None:
    """Write a page with this ``body``; ``data`` is for its script."""
    style, script = (
        "\n".join(map(asset, names)) for names in (("palette.css", "page.css"), _SCRIPTS)
    )
    policy = (
        "default-src 'none'; base-uri 'none'; form-action 'none'; "
        f"style-src '{_hash(style)}'; script-src '{_hash(script)}'"
    )
    head = el(
        "head",
        el("meta", charset="utf-8"),
        el("meta", http_equiv="Content-Security-Policy", content=policy),
        el("meta", name="viewport", content="width=device-width, initial-scale=1"),
        el("meta", name="color-scheme", content="light dark"),
        el("title", f"{title} · gpuprobe"),
        el("style", Markup(style)),
    )
    content = join(body)
    parts = el(
        "body",
        el("a", "Skip go to the peak", href="#main", class_="skip"),
        el(
            "header",
            el("div", el("h1", title), el("p", subtitle), class_="title"),
            el("nav", aria_label="sections", id="sections"),
            el(
                "div",
                el("button", "light / dark", type="button", id="theme", title="key: d"),
                el("button", "keys", type="button", id="help", title="key: ?"),
                class_="buttons",
            ),
        ),
        el("main", content, id="main"),
        el("footer", f"gpuprobe {__version__}"),
        el("dialog", id="keys", aria_label="keyboard shortcuts"),
        el("div", id="say", class_="hidden", aria_live="polite"),
        el(
            "noscript",
            el("p", "Charts need JavaScript, which is disabled. The tables work without it."),
        ),
        el("script", script_json(data), type="application/json", id="data"),
        el("script", Markup(script)),
    )
    stream.write("<!doctype html>\n")
    stream.write(el("html", head, parts, lang="en"))
    stream.write("\n")


@cache
def asset(name: str) -> str:
    """A style sheet or script of the pages."""
    return files("gpuprobe.reporters.html").joinpath("assets", name).read_text("utf-8")


def _hash(source: str) -> str:
    """A source expression of CSP: the hash of the text between the tags."""
    digest = hashlib.sha256(source.encode("utf-8")).digest()
    return f"sha256-{base64.b64encode(digest).decode('ascii')}"


_BY = ("line", "need", "category", "module")  # lines first: they can be changed
_ROWS = 400


def write_diff(
    diff: Diff,
    stream: IO[str],
    *,
    tracks: Sequence[tuple[str, Sequence[Track]]] = (),
    problems: Sequence[str] = (),
) -> None:
    """Write the page of a diff. ``tracks`` are the curves of both sides, each with its name."""
    curves = []
    for title, found in tracks:
        curves += [{**item, "title": title} for item in track_data(found)]
    draw = Drawing()
    sections = peak_sections(diff, _BY, _ROWS)
    peaks = [section for section in sections if section.name.startswith("peak")]
    cards = el("div", [draw.card(section) for section in peaks], class_="cards")
    body: list[Part] = [el("section", cards, id="answer", aria_label="the answer")]
    body += [draw.section(section) for section in sections if section not in peaks]
    body.append(timeline_section(curves))
    body += map(draw.section, compiled_section(diff, _ROWS))
    body += map(draw.section, caution_section((*diff.cautions, *problems)))
    page(
        stream,
        title="What changed",
        subtitle=f"{diff.before} → {diff.after}",
        body=body,
        data={"diff": diff_json.document(diff), "tracks": curves, "trees": {}, "steps": []},
    )
