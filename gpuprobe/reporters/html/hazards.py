"""Stream hazards and the sync ledger in the HTML pages, from the hazards document."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gpuprobe.reporters.html.markup import Markup, Part, el, join
from gpuprobe.reporters.html.parts import Column, listed, place, plural, section, table

__all__ = ["excerpt", "hazard_sections"]

_AROUND = 2  # lines of source before and after
_MOST_SOURCE = 1 << 20  # bytes of a file that is read for an excerpt
_MOST_FINDINGS = 200


def hazard_sections(document: dict[str, Any], cwd: str = "") -> Markup:
    """Hazards with their source, where the host waits, and what could not be seen."""
    races = [item for item in document["findings"] if item["kind"] != "implicit-sync"]
    return join([_races(document, races, cwd), _syncs(document, cwd), _coverage(document)])


def _races(document: dict[str, Any], races: list[dict[str, Any]], cwd: str) -> Markup:
    operations = document["operations"]
    if not races:
        text = (
            f"No stream hazards among {operations:,} operations, in what could be seen."
            if operations
            else "Nothing to judge: the program launched nothing on a GPU."
        )
        return section("hazards", "Stream hazards", el("p", text), short="Hazards")
    compared = document.get("baseline")
    known = set() if compared is None else set(compared["known"])
    cards: list[Part] = [_race(item, cwd, known) for item in races[:_MOST_FINDINGS]]
    note = f"{plural(len(races), 'hazard')} among {operations:,} operations."
    if len(races) > _MOST_FINDINGS:
        note += f" The first {_MOST_FINDINGS} are shown."
    return section("hazards", "Stream hazards", cards, note=note, short="Hazards")


def _race(item: dict[str, Any], cwd: str, known: set[str]) -> Markup:
    spots = [spot for spot in (*item["related"], item["location"]) if spot is not None]
    fix = item["fix"]
    return el(
        "article",
        el(
            "h3",
            el("span", item["rule"], class_="rule"),
            f" {item['kind']}",
            f" · {item['count']} times" if item["count"] > 1 else None,
            " · in the baseline" if item["fingerprint"] in known else None,
        ),
        el("p", item["message"]),
        [[place(f"{s['file']}:{s['line']} in {s['function']}", cwd), excerpt(s)] for s in spots],
        el(
            "dl",
            [[el("dt", e["name"]), el("dd", e["value"])] for e in item["evidence"]],
            class_="evidence",
        )
        if item["evidence"]
        else None,
        el("p", el("b", "Fix: "), fix["text"], class_="fix") if fix else None,
        el("pre", el("code", fix["code"])) if fix and fix["code"] else None,
        class_=f"card {item['level']}",
    )


def _syncs(document: dict[str, Any], cwd: str) -> Markup:
    def where(row: dict[str, Any]) -> tuple[Part, str]:
        spot = row["location"]
        if spot is None:
            return "an unknown line", ""
        key = f"{spot['file']}:{spot['line']}"
        return place(f"{key} in {spot['function']}" if spot["function"] else key, cwd), key

    def seconds(row: dict[str, Any]) -> tuple[Part, float]:
        spent = row["seconds"]
        if spent is None:
            return el("span", "-", title="not measured"), -1.0
        return f"{spent * 1000:.2f} ms", spent

    columns = [
        Column("times", lambda row: (f"{row['count']:,}", row["count"])),
        Column("waited", seconds),
        Column("line", where, number=False),
        Column("why", lambda row: (row["reason"], row["reason"]), number=False),
        Column(
            "allowed",
            lambda row: ("yes" if row["allowed"] else el("b", "no"), int(row["allowed"])),
            number=False,
        ),
        Column("instead", lambda row: (row["replacement"], row["replacement"]), number=False),
    ]
    rows = sorted(document["syncs"], key=lambda row: (row["allowed"], -row["count"]))
    if not rows:
        return Markup("")
    return section(
        "syncs",
        "Where the host waits for the GPU",
        table(columns, rows, caption="sync ledger", find=True),
        short="Waits",
    )


def _coverage(document: dict[str, Any]) -> Markup:
    title = "Where hazards could not be looked for"
    return section("not-judged", title, listed(document["coverage"]), short="Not judged")


def excerpt(spot: dict[str, Any], root: Path | None = None) -> Markup | None:
    """The source around a place, where it can be shown.

    Only Python files below ``root`` (the current directory) are read: a recording from elsewhere
    names any path it likes, and a page made from it is passed on.
    """
    base = (root or Path.cwd()).resolve()
    if not spot["file"].endswith((".py", ".pyi", ".pyx")) or "\0" in spot["file"]:
        return None
    try:
        path = Path(spot["file"]).resolve()
        if not path.is_relative_to(base) or not path.is_file():
            return None
        if path.stat().st_size > _MOST_SOURCE:
            return None
        lines = path.read_text("utf-8", errors="replace").splitlines()
    except (OSError, RuntimeError):  # RuntimeError: a loop of links, before Python 3.13
        return None
    at = spot["line"] - 1
    if not 0 <= at < len(lines):
        return None
    shown: list[Part] = []
    for index in range(max(0, at - _AROUND), min(len(lines), at + _AROUND + 1)):
        row = [el("span", f"{index + 1:>5} ", class_="number"), lines[index].expandtabs(4)]
        shown.append(el("mark", row) if index == at else el("span", row))
        shown.append(Markup("\n"))
    return el("pre", el("code", shown), class_="source")
