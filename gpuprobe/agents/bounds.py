"""Documents of a limited size."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

from gpuprobe.errors import DataError

KEPT: Final = 3
"""Elements that remain in each list. Shorter lists may be pairs, such as a version."""


class Cut(NamedTuple):
    """A list that was shortened: its place in the document (``by_line``, ``ranks[0].steps``), and
    its length after and before.
    """

    place: str
    shown: int
    total: int


def shorten(document: dict[str, Any], most: int) -> list[Cut]:
    """Shorten the lists of ``document`` at their ends, always the longest one by half, until it has
    at most ``most`` bytes as compact JSON in UTF-8. Tables are sorted, so that their largest rows
    remain.

    Returns the lists that were shortened. Raises DataError if it is still too large with `KEPT`
    elements in each list.
    """
    before: dict[str, int] = {}
    lists = dict(_lists(document, ""))
    size = size_of(document)
    while size > most:
        place, longest = max(lists.items(), key=lambda item: len(item[1]), default=("", []))
        if len(longest) <= KEPT:
            raise DataError(f"the result has {size} bytes, more than the limit of {most}")
        before.setdefault(place, len(longest))
        del longest[max(KEPT, len(longest) // 2) :]
        lists = dict(_lists(document, ""))
        size = size_of(document)
    return [
        Cut(place, len(lists[place]), total) for place, total in before.items() if place in lists
    ]


def size_of(document: object) -> int:
    """The bytes of a document as compact JSON in UTF-8."""
    return len(encoded(document))


def encoded(document: object) -> bytes:
    """Compact JSON in UTF-8. Bytes of file names that are not UTF-8 become question marks."""
    text = json.dumps(document, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.encode("utf-8", "replace")


def _lists(value: object, place: str) -> Iterator[tuple[str, list[Any]]]:
    """All lists of a document, with their places."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _lists(inner, f"{place}.{key}" if place else str(key))
    elif isinstance(value, list):
        yield place, value
        for number, inner in enumerate(value):
            yield from _lists(inner, f"{place}[{number}]")
