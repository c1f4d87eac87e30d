"""Two HTML pages that compare: a diff of two recordings, and a check against a baseline.

Both are made from the documents that ``diff --json`` and ``check --json`` print, and hold them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import IO, Any

from gpuprobe.analysis.trace.tracks import Track
from gpuprobe.model.text import human_bytes, human_delta
from gpuprobe.model.values import Peak, Unavailable
from gpuprobe.reporters.html.data import track_data
from gpuprobe.reporters.html.markup import Markup, Part, el, join
from gpuprobe.reporters.html.parts import (
    Column,
    amount,
    change,
    delta_bar,
    listed,
    place,
    plural,
    section,
    size,
    table,
    unknown,
)
from gpuprobe.reporters.html.report import page, timeline_section

__all__ = ["write_check", "write_diff"]

Document = dict[str, Any]

_TITLES = {
    "line": "What changed, by line",
    "category": "What changed, by category",
    "module": "What changed, by module",
}
_STATUS = {"added": "new", "removed": "gone", "same": "", "changed": ""}


def write_diff(
    document: Document,
    stream: IO[str],
    *,
    tracks: Sequence[tuple[str, Sequence[Track]]] = (),
    problems: Sequence[str] = (),
) -> None:
    """Write the page of a diff. ``tracks`` are the curves of both sides, each with its name."""
    curves = []
    for title, found in tracks:
        curves += [{**item, "title": title} for item in track_data(found)]
    cautions = [*document["cautions"], *problems]
    body: list[Part] = [_peaks(document)]
    for index, peak in enumerate(document["peaks"]):
        where = _where(peak) if len(document["peaks"]) > 1 else ""
        body += _breakdown(peak["rows"], where, f"-{index}" if index else "")
    body += [timeline_section(curves), _mind(cautions)]
    page(
        stream,
        title="What changed",
        subtitle=f"{document['before']} → {document['after']}",
        body=body,
        data={"diff": document, "tracks": curves, "trees": {}, "steps": []},
    )


def _where(peak: Document) -> str:
    return f"rank {peak['rank']}, {peak['device']}"


def _peaks(document: Document) -> Markup:
    cards = [_peak_card(peak) for peak in document["peaks"]]
    if not cards:
        cards = [el("div", el("p", "No peak was recorded on either side."), class_="card")]
    return el("section", el("div", cards, class_="cards"), id="answer", aria_label="the answer")


def _peak_card(peak: Document) -> Markup:
    before, after, delta = peak["before"], peak["after"], peak["delta"]
    phases = [side.get("phase") for side in (before, after)]
    said = None
    if any(phases):
        same = phases[0] == phases[1]
        first, second = (phase or "no phase" for phase in phases)
        said = f"in {first} both times" if same else f"in {first}, then in {second}"
    return el(
        "div",
        el("h2", f"Peak memory, {_where(peak)}"),
        _big(delta)
        if isinstance(delta, int)
        else el("p", f"The change is not known: {delta['unavailable']}"),
        el("p", f"{amount(_read(before))} → {amount(_read(after))}"),
        el("p", said) if said else None,
        _compared(peak["compared"]),
        class_="card",
    )


def _compared(moments: Document | None) -> Markup | None:
    """Which moments the tables compare, where a peak has no trace."""
    if moments is None:
        return None
    words = []
    for side in (moments["before"], moments["after"]):
        of = "the snapshot" if side["step"] is None else f"step {side['step']}"
        below = side["below_peak"]
        far = f"{human_bytes(below)} below its peak" if below else "its peak"
        words.append(f"{of} ({human_bytes(side['allocated'])}, {far})")
    return el("p", f"Not every peak has a trace: the tables compare {words[0]} with {words[1]}.")


def _big(delta: int) -> Markup:
    kind = "big up" if delta > 0 else "big down" if delta < 0 else "big"
    return el("p", human_delta(delta), class_=kind, title=f"{delta:+,} B")


def _breakdown(rows: Document, where: str, suffix: str) -> list[Part]:
    """The tables of one peak, lines first: they are what one can act on."""
    found: list[Part] = []
    for by in ("line", "category", "module"):
        if by not in rows:
            continue
        title = f"{_TITLES[by]}: {where}" if where else _TITLES[by]
        body: Part = (
            unknown(Unavailable(rows[by]["unavailable"]))
            if "unavailable" in rows[by]
            else _changes(rows[by], by)
        )
        found.append(section(f"by-{by}{suffix}", title, body, short=f"By {by}"))
    return found


def _changes(rows: Sequence[Document], by: str) -> Markup:
    """The rows that changed, what did not in one row, and the total."""
    changed = [row for row in rows if row["delta"] or row["status"] in ("added", "removed")]
    same = sum(row["before"] for row in rows if row not in changed)
    most = max((abs(row["delta"]) for row in changed), default=0)

    def name(row: Document) -> tuple[Part, str]:
        moved = row["moved_from"]
        note = f" (was {moved})" if moved else ""
        return [place(row["key"]), el("span", note, class_="note") if note else None], row["key"]

    def status(row: Document) -> tuple[Part, str]:
        text = _STATUS.get(row["status"], str(row["status"]))
        return text, text

    columns = [
        Column("change", lambda row: change(row["delta"])),
        Column("", lambda row: (delta_bar(row["delta"], most), row["delta"])),
        Column("before", lambda row: size(row["before"])),
        Column("after", lambda row: size(row["after"])),
        Column(by, name, number=False),
        Column("", status, number=False),
    ]
    before, after = (sum(row[side] for row in rows) for side in ("before", "after"))
    foot: list[Part] = [human_delta(after - before), "", human_bytes(before), human_bytes(after)]
    foot += [f"total, of which {human_bytes(same)} did not change" if same else "total", ""]
    if not changed:
        return el("p", f"Nothing changed: {human_bytes(before)} both times.")
    return table(columns, changed, caption=f"changes by {by}", foot=foot, find=True)


def _mind(cautions: Sequence[str]) -> Markup:
    return section("mind", "Mind", listed(cautions), short="Mind")


# -- a check


def write_check(document: Document, stream: IO[str], *, title: str = "memory check") -> None:
    """Write the page of a check against a baseline."""
    regressed = [m for m in (*document["metrics"], *document["phases"]) if m["regressed"]]
    body: list[Part] = [_verdict(document, regressed)]
    body.append(
        section(
            "metrics",
            "Against the baseline",
            _metrics(document["metrics"], "metrics"),
            short="Metrics",
        )
    )
    moved = [metric for metric in document["phases"] if metric["delta"] or metric["regressed"]]
    if moved:
        body.append(
            section(
                "phases", "Peak of each phase and kind of step", _metrics(moved, "phases"),
                short="Phases",
            )
        )  # fmt: skip
    if document["rows"] is not None:
        body += _breakdown(
            {by: [_full(row) for row in rows] for by, rows in document["rows"].items()}, "", ""
        )
    told = [f"{s['name']} {s['value']} ({s['source']})" for s in document["settings"]]
    body.append(section("settings", "How it was measured", listed(told), short="Settings"))
    body.append(_mind(document["cautions"]))
    page(
        stream,
        title=title,
        subtitle="within the baseline" if document["ok"] else "above the baseline",
        body=body,
        data={"check": document, "tracks": [], "trees": {}, "steps": []},
    )


def _full(row: Document) -> Document:
    return {"blocks_before": None, "blocks_after": None, **row}


def _verdict(document: Document, regressed: Sequence[Document]) -> Markup:
    if document["mismatches"]:
        banner = el(
            "div",
            el("p", el("b", "The baseline is of another environment: nothing can be concluded.")),
            listed(document["mismatches"]),
            class_="banner",
        )
    elif not regressed:
        banner = el("p", el("b", "Memory is within the baseline."), class_="banner ok")
    else:
        said = f"{plural(len(regressed), 'metric')} above the baseline."
        banner = el("p", el("b", said), class_="banner")
    cards: list[Part] = []
    seen: set[str] = set()
    for metric in regressed:
        if metric["place"] and metric["place"] in seen:
            continue
        seen.add(metric["place"])
        cards.append(
            el(
                "div",
                el("h2", metric["name"] if len(cards) else f"First cause: {metric['name']}"),
                _change_of(metric),
                el("p", metric["cause"]) if metric["cause"] else None,
                el("p", place(metric["place"])) if metric["place"] else None,
                class_="card",
            )
        )
    shown = el("div", cards[:3], class_="cards") if cards else None
    return el("section", banner, shown, id="answer", aria_label="the answer")


def _change_of(metric: Document) -> Markup:
    if metric["unit"] == "bytes":
        return _big(metric["delta"])
    return el("p", f"{metric['delta']:+,}", class_="big up" if metric["delta"] > 0 else "big")


def _metrics(metrics: Sequence[Document], caption: str) -> Markup:
    def shown(name: str) -> Callable[[Document], tuple[Part, int]]:
        def cell(metric: Document) -> tuple[Part, int]:
            value = metric[name]
            return size(value) if metric["unit"] == "bytes" else (f"{value:,}", value)

        return cell

    def moved(metric: Document) -> tuple[Part, int]:
        delta = metric["delta"]
        if metric["unit"] == "bytes":
            return change(delta)
        return el(
            "span", f"{delta:+,}" if delta else "0", class_="up" if delta > 0 else None
        ), delta

    def name(metric: Document) -> tuple[Part, str]:
        text = metric["name"]
        return (el("b", text) if metric["regressed"] else text), text

    def verdict(metric: Document) -> tuple[Part, str]:
        text = "above" if metric["regressed"] else "ok"
        return el("span", text, class_="up" if metric["regressed"] else None), text

    columns = [
        Column("metric", name, number=False),
        Column("baseline", shown("before")),
        Column("now", shown("after")),
        Column("change", moved),
        Column("limit", shown("limit"), hint="baseline and tolerance"),
        Column("", verdict, number=False),
        Column("accepted", lambda m: (join([m["accepted"], f" ({m['source']})"]), m["accepted"]),
               number=False),
    ]  # fmt: skip
    return table(columns, list(metrics), caption=caption)


def _read(plain: dict[str, Any]) -> Peak | Unavailable:
    """A peak, from the document."""
    if "unavailable" in plain:
        return Unavailable(plain["unavailable"])
    return Peak(plain["at_least"], plain["at_most"])
