"""Picking from columns without a Python call per row."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from operator import itemgetter


def selector(actions: array[int], *codes: int) -> bytes:
    """A byte per event: 1 where the action is one of ``codes``. For `itertools.compress`."""
    table = bytearray(256)
    for code in codes:
        table[code] = 1
    return actions.tobytes().translate(bytes(table))


def selected(column: Sequence[int], rows: Sequence[int]) -> tuple[int, ...]:
    """The values of ``column`` at ``rows``."""
    if len(rows) < 2:
        return tuple(column[row] for row in rows)
    return tuple(itemgetter(*rows)(column))
