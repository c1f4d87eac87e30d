"""The parts that the pages share: sections, tables that sort, places in code, bars."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from gpuprobe.model.text import human_bytes, human_delta
from gpuprobe.model.values import Peak, Unavailable
from gpuprobe.reporters.html.markup import Markup, Part, el, join

__all__ = [
    "Column",
    "amount",
    "bar",
    "change",
    "delta_bar",
    "listed",
    "place",
    "plural",
    "section",
    "size",
    "table",
    "unknown",
]

SHOWN = 25
"""Rows of a table that are shown, and printed, before one asks for the rest."""

_PLACE = re.compile(r"(?P<folder>.*[/\\])?(?P<name>[^/\\]+:\d+)(?P<rest> in .*)?", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table: its title, whether it holds numbers, and what it says of a row:
    what is shown, and the number or text to sort by.
    """

    title: str
    cell: Callable[[Any], tuple[Part, int | float | str]]
    number: bool = True
    hint: str = ""


def section(name: str, title: str, *parts: Part, note: Part = None, short: str = "") -> Markup:
    """A titled section; ``name`` is its anchor, ``short`` its name in the page's list of sections.
    Nothing at all where no part says anything.
    """
    body = join(parts)
    if not body:
        return Markup("")
    return el(
        "section",
        el("h2", title, id=f"{name}-title"),
        el("p", note, class_="note") if note else None,
        body,
        id=name,
        data_nav=short or None,
        aria_labelledby=f"{name}-title",
    )


def table(
    columns: Sequence[Column],
    rows: Sequence[Any],
    *,
    caption: str,
    foot: Sequence[Part] = (),
    find: bool = False,
    name: str = "",
) -> Markup:
    """A table whose columns can be sorted by; ``foot`` is its last row, cell by cell."""
    head = el(
        "tr",
        [
            el(
                "th",
                el("button", column.title, type="button", class_="sort"),
                scope="col",
                class_="n" if column.number else None,
                title=column.hint or None,
            )
            for column in columns
        ],
    )
    body = []
    for index, row in enumerate(rows):
        cells = []
        for column in columns:
            shown, key = column.cell(row)
            cells.append(el("td", shown, class_="n" if column.number else None, data_v=key))
        body.append(el("tr", cells, class_="more" if index >= SHOWN else None))
    cells_below = [
        el("td", part, class_="n" if column.number else None)
        for part, column in zip(foot, columns, strict=False)
    ]
    tools = []
    if find and len(rows) > 8:
        tools.append(
            el("input", type="search", placeholder="filter", aria_label=f"filter {caption}")
        )
    if len(rows) > SHOWN:
        tools.append(el("button", f"show all {len(rows)}", type="button", class_="all"))
    return el(
        "div",
        el("div", tools, class_="tools") if tools else None,
        el(
            "div",
            el(
                "table",
                el("caption", caption),
                el("thead", head),
                el("tbody", body),
                el("tfoot", el("tr", cells_below)) if cells_below else None,
            ),
            class_="scroll",
            tabindex="0",
            role="region",
            aria_label=caption,
        ),
        class_="table",
        id=name or None,
    )


def size(count: int) -> tuple[Part, int]:
    """A cell of bytes. The exact number is in its title."""
    return el("span", human_bytes(count), title=f"{count:,} B"), count


def change(count: int) -> tuple[Part, int]:
    """A cell of a change in bytes."""
    kind = "up" if count > 0 else "down" if count < 0 else None
    return el("span", human_delta(count), title=f"{count:+,} B", class_=kind), count


def amount(bounds: Peak | Unavailable) -> str:
    """A peak for people: exact, or between its bounds."""
    if isinstance(bounds, Unavailable):
        return "not known"
    if bounds.exact:
        return human_bytes(bounds.at_least)
    return f"{human_bytes(bounds.at_least)} to {human_bytes(bounds.at_most)}"


def bar(share: float, name: str = "") -> Markup:
    """A bar of a share from 0 to 1. Drawn as SVG: style attributes are forbidden in the page."""
    width = f"{min(max(share, 0.0), 1.0) * 100:.2f}"
    box = el("rect", x="0", y="0", width=width, height="8", class_=f"fill {name}".strip())
    return el(
        "svg",
        box,
        viewBox="0 0 100 8",
        preserveAspectRatio="none",
        class_="bar",
        aria_hidden="true",
    )


def delta_bar(count: int, most: int) -> Markup:
    """A bar to the right for more, to the left for less; ``most`` is the widest of them."""
    width = 50 * abs(count) / most if most else 0.0
    box = el(
        "rect",
        x=f"{50 - width if count < 0 else 50:.2f}",
        y="0",
        width=f"{width:.2f}",
        height="8",
        class_="less" if count < 0 else "fill",
    )
    middle = el("line", x1="50", x2="50", y1="0", y2="8", class_="axis")
    return el(
        "svg",
        middle,
        box,
        viewBox="0 0 100 8",
        preserveAspectRatio="none",
        class_="bar wide",
        aria_hidden="true",
    )


def place(key: str, cwd: str = "") -> Markup:
    """``folder/file.py:12 in f`` with what tells most set apart. Other text as it is."""
    below = cwd.rstrip("/\\")
    if below and key.startswith((below + "/", below + "\\")):
        key = key[len(below) + 1 :]
    found = None if key.startswith("(") else _PLACE.fullmatch(key)
    if found is None:
        return el("span", key, class_="place")
    folder = found["folder"]
    return el(
        "span",
        el("span", folder, class_="dir") if folder else None,
        el("b", found["name"]),
        el("span", found["rest"], class_="dir") if found["rest"] else None,
        class_="place",
    )


def plural(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def unknown(value: Unavailable) -> Markup:
    """Why something cannot be shown."""
    return el("p", f"Not known: {value.reason}", class_="unknown")


def listed(items: Iterable[Part]) -> Markup | None:
    found = [el("li", item) for item in items]
    return el("ul", found) if found else None
