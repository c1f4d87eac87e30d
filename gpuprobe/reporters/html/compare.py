"""Two HTML pages that compare: a diff of two recordings, and a check against a baseline. Each
holds the JSON document of what it shows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import IO

from gpuprobe.analysis.baseline import CheckResult
from gpuprobe.analysis.compare.diff import Diff
from gpuprobe.analysis.inspection.tracks import Track
from gpuprobe.reporters.html.data import track_data
from gpuprobe.reporters.html.draw import Drawing
from gpuprobe.reporters.html.markup import Part, el
from gpuprobe.reporters.html.report import page, timeline_section
from gpuprobe.reporters.json import check as check_json
from gpuprobe.reporters.json import diff as diff_json
from gpuprobe.reporters.sections.check import run_sections
from gpuprobe.reporters.sections.diff import caution_section, compiled_section, peak_sections

_BY = ("line", "category", "module")  # lines first: they are what one can act on
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


def write_check(*results: CheckResult, stream: IO[str], title: str = "memory check") -> None:
    """Write the page of checks against baselines."""
    draw = Drawing()
    verdict, *rest = run_sections(*results, top=_ROWS)
    banner = el(
        "div",
        el("p", el("b", verdict.title)),
        draw.parts(verdict),
        class_="banner ok" if all(result.ok for result in results) else "banner",
    )
    body: list[Part] = [el("section", banner, id="answer", aria_label="the answer")]
    body += map(draw.section, rest)
    page(
        stream,
        title=title,
        subtitle=verdict.title,
        body=body,
        data={"check": check_json.document(*results), "tracks": [], "trees": {}, "steps": []},
    )
