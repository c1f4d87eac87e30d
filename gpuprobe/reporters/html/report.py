"""The report as one HTML page that needs nothing else: no network, no library.

The page is made of two things. What is read (the answer, tables, words) is plain HTML, so that
it is there without JavaScript, on paper and for a screen reader. What is drawn (curves, treemap,
flame graph) comes from data in the page, drawn by the page's own code.

Nothing that was recorded is trusted: text is made visible and escaped (`html_markup`), data is
JSON without ``<``, and a content security policy allows this page's own style and script, by
their hashes, and nothing else.
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
from gpuprobe.analysis.peak.flame import FlameNode
from gpuprobe.analysis.trace.tracks import Track
from gpuprobe.model.report import Report, Steps
from gpuprobe.reporters.html import sections
from gpuprobe.reporters.html.data import step_columns, track_data, tree_data
from gpuprobe.reporters.html.hazards import hazard_sections
from gpuprobe.reporters.html.markup import Markup, Part, el, join, script_json
from gpuprobe.reporters.html.parts import section
from gpuprobe.reporters.json.report import to_document

__all__ = ["ROWS", "data_of", "page", "write"]

ROWS = 400
"""Lines and modules in the tables: the ``top`` that the report is to be made with."""

_SCRIPTS = ("base.js", "timeline.js", "trees.js", "main.js")

Trees = dict[str, FlameNode]


def data_of(
    report: Report, tracks: Sequence[Track] = (), trees: Trees | None = None
) -> dict[str, Any]:
    """What the page draws and, under ``report``, the report it was made from; the rows of its
    steps are in columns of their own (``steps``).
    """
    rows = report.steps.rows
    document = to_document(replace(report, steps=Steps(report.steps.highlights, ())))
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
    hazards: dict[str, Any] | None = None,
) -> None:
    """Write the page of a recording to a text stream (UTF-8).

    ``report`` is made with `ROWS` rows; ``tracks`` and ``problems`` are
    what `gpuprobe.analysis.trace.tracks.tracks` gives, ``trees`` those of the peak, named
    ``categories``, ``modules`` and ``stacks``; ``hazards`` is the hazards document.
    """
    data = data_of(report, tracks, trees)
    spots = [(spot.what, spot.consequence) for spot in report.blind_spots]
    spots += [(problem, "") for problem in problems]
    cwd = report.session.cwd
    body: list[Part] = [
        sections.answer(report),
        timeline_section(data["tracks"]),
        peak_section(data["trees"]),
        sections.lines(report),
        sections.modules(report),
        sections.failures(report),
        sections.growth(report),
        sections.fragmentation(report),
        sections.steps(report),
        sections.ranks(report),
        hazard_sections(hazards, cwd) if hazards is not None else None,
        sections.findings(report),
        sections.unseen(spots),
        sections.environment(report),
    ]
    page(
        stream,
        title=report.recording.name,
        subtitle=" · ".join(sections.facts(report)),
        body=body,
        data=data,
    )


def timeline_section(tracks: Sequence[dict[str, Any]]) -> Markup:
    """The place where the curves are drawn. Nothing where no memory was traced."""
    if not tracks:
        return Markup("")
    events = sum(track["events"] for track in tracks)
    note = f"{events:,} allocator events."
    if not all(track["complete"] for track in tracks):
        note += " Drawn from fewer points, with every high and low of each stretch kept."
    sources = {track["phases"]["from"] for track in tracks}
    if "stacks" in sources:
        note += " Phases are told from the stacks."
    return section(
        "timeline",
        "Memory over time",
        el("div", class_="chart", data_chart="timeline"),
        note=note,
        short="Timeline",
    )


def peak_section(trees: dict[str, Any]) -> Markup:
    """The places of treemap and flame graph."""
    if not trees:
        return Markup("")
    return section(
        "peak",
        "Live at the peak",
        el("div", class_="treemap", data_tree="treemap"),
        el("h3", "By call stack"),
        el("div", class_="flame", data_tree="flame"),
        short="Peak",
        note="Areas and widths are bytes. Click or press Enter to look inside, Escape to go back.",
    )


def page(
    stream: IO[str], *, title: str, subtitle: str, body: Sequence[Part], data: dict[str, Any]
) -> None:
    """Write a page around ``body``; ``data`` is what its script draws."""
    style, script = _asset("page.css"), "\n".join(_asset(name) for name in _SCRIPTS)
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
        el("a", "Skip to the answer", href="#main", class_="skip"),
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
            el("p", "Charts need JavaScript, which is switched off. The tables do not."),
        ),
        el("script", script_json(data), type="application/json", id="data"),
        el("script", Markup(script)),
    )
    stream.write("<!doctype html>\n")
    stream.write(el("html", head, parts, lang="en"))
    stream.write("\n")


@cache
def _asset(name: str) -> str:
    return files("gpuprobe.reporters.html").joinpath("assets", name).read_text("utf-8")


def _hash(source: str) -> str:
    """A source expression of CSP: the hash of what stands between the tags."""
    digest = hashlib.sha256(source.encode("utf-8")).digest()
    return f"sha256-{base64.b64encode(digest).decode('ascii')}"
