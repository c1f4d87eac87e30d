"""HTML built from parts, so that text from elsewhere cannot become markup.

Only `Markup` is markup. Everything else that is put into an element is text: made visible
(control characters, marks that turn the writing direction) and escaped.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterable
from typing import Any

from gpuprobe.model.text import visible

_VOID = frozenset({"input", "meta", "br", "col"})
_HALF = re.compile("[\ud800-\udfff]")  # a whole pair is one character of a str
_EMPTY = frozenset({"rect", "line", "polygon"})  # of SVG: there only the slash ends an element


class Markup(str):
    """Text that is HTML already."""

    __slots__ = ()


Part = str | int | float | None | Iterable[Any]
"""What may be in an element: markup, text, numbers, several of them; None is nothing."""


def text(value: str) -> Markup:
    """Untrusted text, fit for an element and for an attribute in quotes."""
    return Markup(html.escape(visible(value), quote=True))


def join(part: Part) -> Markup:
    """The parts one after the other."""
    if part is None:
        return Markup("")
    if isinstance(part, Markup):
        return part
    if isinstance(part, str):
        return text(part)
    if isinstance(part, (int, float)):
        return text(str(part))
    return Markup("".join(join(item) for item in part))


def el(tag: str, *parts: Part, **attributes: str | int | float | bool | None) -> Markup:
    """An element. ``class_`` and ``for_`` stand for the words that Python keeps for itself, and
    ``_`` for a hyphen; an attribute that is None or False is left out.
    """
    given = []
    for name, value in attributes.items():
        if value is None or value is False:
            continue
        key = name.rstrip("_").replace("_", "-")
        given.append(f" {key}" if value is True else f' {key}="{text(str(value))}"')
    if tag in _EMPTY:
        return Markup(f"<{tag}{''.join(given)}/>")
    start = f"<{tag}{''.join(given)}>"
    if tag in _VOID:
        return Markup(start)
    return Markup(f"{start}{join(parts)}</{tag}>")


def script_json(data: Any) -> Markup:
    """Data for a ``<script type="application/json">``: ASCII without ``<``, ``>`` and ``&``, so
    that nothing in it can end the element or begin a comment.

    Halves of surrogate pairs (bytes of a path that are no UTF-8) are shown as escapes: Chromium
    ends where a script puts one into a label.
    """
    dumped = _dumped(data)
    if "\\ud" in dumped:  # halves, or whole pairs
        plain = json.dumps(data, ensure_ascii=False)
        dumped = _dumped(
            json.loads(_HALF.sub(lambda half: json.dumps(visible(half[0]))[1:-1], plain))
        )
    for char in "<>&":
        dumped = dumped.replace(char, f"\\u{ord(char):04x}")
    return Markup(dumped)


def _dumped(data: Any) -> str:
    return json.dumps(data, separators=(",", ":"), allow_nan=False)
