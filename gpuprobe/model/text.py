"""Text for people: untrusted text made visible, measured in columns, and bytes with units.

The same units everywhere in the tool: binary prefixes (1 KiB = 1024 B), as torch prints them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Final

MOST_NAME: Final = 10_000
"""Characters of a name that are kept. Paths have 4,096 bytes at most (PATH_MAX, Linux), names of
C++ templates a few thousand."""


def shortened(text: str) -> str:
    """The text; one that is longer than any name, cut."""
    return text if len(text) <= MOST_NAME else text[:MOST_NAME] + "…"


def visible(text: str) -> str:
    """The text with control characters shown, not executed.

    Process names, model names and paths come from elsewhere: an escape sequence in one of
    them must not reach the terminal. Newlines are shown too, so one value stays one line, and so is
    what a CI service would take for a command in its log.
    """
    if not text.isprintable():
        text = "".join(c if c.isprintable() else _shown(c) for c in text)
    if "::" in text or "##" in text:
        text = _COMMAND.sub(lambda match: _shown(match[0][0]) + match[0][1:], text)
    return text


def code_lines(text: str) -> list[str]:
    """The lines of code as `visible` text. Their tabs stay: in a patch these are code."""
    return ["\t".join(map(visible, line.split("\t"))) for line in text.splitlines()]


# What GitHub's runner executes when it is printed: ``::name …::`` at the start of a line, and
# ``##[name]`` anywhere (actions/runner, ActionCommand.cs); and Azure's agent, ``##vso[name]``.
_COMMAND = re.compile(r"(?:^|(?<=\s))::(?=[A-Za-z-]+(?:\s[^:]*)?::)|##(?=[a-z]*\[)")


def _shown(char: str) -> str:
    code = ord(char)
    if 0xDC80 <= code <= 0xDCFF:  # a byte that was not UTF-8 (surrogateescape)
        return f"\\x{code - 0xDC00:02x}"
    if code < 0x100:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def human_bytes(count: int) -> str:
    """``count`` bytes with a binary prefix and one decimal: ``512 B``, ``1.5 MiB``."""
    size = float(abs(count))
    sign = "-" if count < 0 else ""
    if size < 1024:
        return f"{sign}{abs(count)} B"
    for unit in ("KiB", "MiB", "GiB", "TiB"):
        size /= 1024
        # 1023.95 would be printed as 1024.0: it belongs to the next unit.
        if size < 1023.95 or unit == "TiB":
            return f"{sign}{size:.1f} {unit}"
    raise AssertionError("unreachable")  # pragma: no cover


def human_delta(count: int) -> str:
    """A change in bytes, with its sign: ``+1.5 MiB``, ``-512 B``, ``0 B``."""
    return ("+" if count > 0 else "") + human_bytes(count)


def human_ns(duration: int) -> str:
    """A duration in nanoseconds for people: ``850 ns``, ``1.2 ms``, ``3.40 s``."""
    if duration < 1_000:
        return f"{duration} ns"
    if duration < 1_000_000:
        return f"{duration / 1_000:.1f} µs"
    if duration < 1_000_000_000:
        return f"{duration / 1_000_000:.1f} ms"
    return f"{duration / 1_000_000_000:.2f} s"


def amount(number: int, unit: str) -> str:
    """A number of ``bytes``, ``ns`` or anything else, as text."""
    if unit == "bytes":
        return human_bytes(number)
    return human_ns(number) if unit == "ns" else f"{number:,}"


def amount_delta(number: int, unit: str) -> str:
    """The same for a change, with its sign."""
    if unit == "bytes":
        return human_delta(number)
    if unit == "ns":
        return f"{'-' if number < 0 else '+'}{human_ns(abs(number))}" if number else "0"
    return f"{number:+,}" if number else "0"


def ranges(numbers: Iterable[int], separator: str = ", ") -> str:
    """``0-3, 6``: numbers in order, runs of them as their ends."""
    found: list[list[int]] = []
    for number in sorted(set(numbers)):
        if found and found[-1][1] == number - 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return separator.join(str(a) if a == b else f"{a}-{b}" for a, b in found)


def width(text: str) -> int:
    """Columns that ``text`` takes on a terminal: wide characters two, combining ones none."""
    if text.isascii():
        return len(text)
    import unicodedata

    columns = 0
    for char in text:
        if unicodedata.combining(char):
            continue
        columns += 2 if unicodedata.east_asian_width(char) in "WF" else 1
    return columns


def cut(text: str, columns: int) -> str:
    """``text`` in at most ``columns`` columns, with an ellipsis if it was truncated."""
    # Combining characters take no column: a name could stack thousands of them on one letter.
    most = 4 * columns
    if len(text) <= most and width(text) <= columns:
        return text
    kept: list[str] = []
    left = columns - 1
    for char in text:
        left -= width(char)
        if left < 0 or len(kept) == most:
            break
        kept.append(char)
    return "".join(kept) + "…"


def padded(text: str, columns: int) -> str:
    """``text`` in exactly ``columns`` columns, cut or with spaces after it."""
    text = cut(text, columns)
    return text + " " * (columns - width(text))


def wrapped(text: str, prefix: str, columns: int) -> Iterator[str]:
    """``text`` in lines of at most ``columns``, broken at spaces if it has any."""
    line, indent = prefix, " " * len(prefix)
    for word in visible(text).split(" "):
        word = cut(word, columns - len(prefix))
        fresh = line in (prefix, indent)
        if not fresh and width(line) + 1 + width(word) > columns:
            yield line
            line, fresh = indent, True
        line += word if fresh else " " + word
    yield line


def plural(number: int, noun: str) -> str:
    """A count of things: ``1 step``, ``1,200 steps``. A noun that ends in ``s`` gets ``es``."""
    if number != 1:
        noun += "es" if noun.endswith("s") else "s"
    return f"{number:,} {noun}"
