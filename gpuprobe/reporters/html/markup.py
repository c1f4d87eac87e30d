"""HTML built from parts, so that text from elsewhere cannot become markup.

Only `Markup` is markup. Everything else in an element is text, which is made visible (control
characters, bidirectional marks) and escaped.
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
_EMPTY = frozenset({"rect", "line", "polygon"})  # elements of SVG that a slash ends


class Markup(str):
    """Text that is HTML."""

    __slots__ = ()


Part = str | int | float | None | Iterable[Any]
"""The content of an element: markup, text, numbers, or several of them; None is empty."""


def text(value: str) -> Markup:
    """Untrusted text, escaped for an element or a quoted attribute."""
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
    """An element. ``class_`` and ``for_`` are the attributes of Python's keywords, and ``_`` is a
    hyphen; attributes with the value None or False are omitted.
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


def script_json(data: object) -> Markup:
    """Data for a ``<script type="application/json">``: ASCII without ``<``, ``>`` and ``&``, so
    that nothing in it can end the element or begin a comment.

    Halves of surrogate pairs (bytes of a path that are not UTF-8) become escapes: Chromium crashes
    if a script puts one into a label.
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


def _dumped(data: object) -> str:
    return json.dumps(data, separators=(",", ":"), allow_nan=False)
