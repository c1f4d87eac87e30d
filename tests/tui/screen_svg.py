"""A screen as a small SVG: what a golden file holds and what a person can look at.

Textual's own picture of a 200×60 screen has 200 KB, most of it fonts and random names; this one
has one line of text for each line of the screen, and a class for each style that is used.
"""

from __future__ import annotations

from html import escape
from typing import Any

from rich.segment import Segment
from rich.style import Style
from textual.app import App

__all__ = ["screen_svg", "screen_text"]

_WIDE, _HIGH = 9, 20


def _rows(app: App[Any]) -> list[list[Segment]]:
    strips = app.screen._compositor.render_strips()
    return [list(Segment.simplify(strip)) for strip in strips]


def screen_text(app: App[Any]) -> list[str]:
    """The characters on the screen, line by line."""
    return ["".join(segment.text for segment in row) for row in _rows(app)]


def screen_svg(app: App[Any]) -> str:
    """The screen as SVG, the same for the same screen."""
    classes: dict[tuple[str, str], str] = {}
    body: list[str] = []
    for y, row in enumerate(_rows(app)):
        x = 0
        cells: list[str] = []
        for segment in row:
            look, ground = _look(segment.style or Style())
            name = classes.setdefault((look, ground), f"c{len(classes)}")
            wide = segment.cell_length
            place = f'x="{x * _WIDE}" y="{y * _HIGH}"'
            cells.append(f'<rect {place} width="{wide * _WIDE}" height="{_HIGH}" class="{name}b"/>')
            if segment.text.strip():
                text = escape(segment.text).replace(" ", "\u00a0")
                place = f'x="{x * _WIDE}" y="{y * _HIGH + 15}" textLength="{wide * _WIDE}"'
                cells.append(f'<text {place} class="{name}">{text}</text>')
            x += wide
        body.append("".join(cells))
    styles = "".join(
        f".{name}{{{look}}}.{name}b{{fill:{ground}}}" for (look, ground), name in classes.items()
    )
    size = app.size
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" '
            f'viewBox="0 0 {size.width * _WIDE} {size.height * _HIGH}">',
            f"<style>text{{font:15px monospace;white-space:pre}}"
            f"rect{{shape-rendering:crispEdges}}{styles}</style>",
            *body,
            "</svg>\n",
        ]
    )


def _look(style: Style) -> tuple[str, str]:
    """The CSS of the text, and the colour behind it."""
    front = style.color.get_truecolor().hex if style.color else "#d0d0d0"
    back = style.bgcolor.get_truecolor(foreground=False).hex if style.bgcolor else "#000000"
    if style.reverse:
        front, back = back, front
    look = f"fill:{front}"
    if style.bold:
        look += ";font-weight:bold"
    if style.dim:
        look += ";opacity:.6"
    if style.underline:
        look += ";text-decoration:underline"
    return look, back
