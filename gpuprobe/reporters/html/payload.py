"""Columns of numbers, packed for a page.

A column is kept as differences of neighbours, each of eight bytes, cut into eight planes (all
lowest bytes first, then all second ones …), deflated, in base 64. Memory curves go up and down
by the same amounts again and again, and the high planes are nearly all the same, so a point
takes a byte or so. The page undoes it with the browser's own DecompressionStream.
"""

from __future__ import annotations

import base64
import sys
import zlib
from array import array
from collections.abc import Iterable
from itertools import accumulate
from operator import sub


def pack(values: Iterable[int]) -> str:
    """A column of integers below 2**53 in size, as text. The sum of neighbours must fit, too."""
    column = array("q", values)
    if len(column):
        column = column[:1] + array("q", map(sub, column[1:], column))
    if sys.byteorder == "big":
        column.byteswap()
    raw = column.tobytes()
    planes = b"".join(raw[place::8] for place in range(8))
    return base64.b64encode(zlib.compress(planes, 9)).decode("ascii")


def unpack(packed: str) -> list[int]:
    """The column again: what the page does, for tests and other readers."""
    planes = zlib.decompress(base64.b64decode(packed))
    count = len(planes) // 8
    raw = bytearray(len(planes))
    for place in range(8):
        raw[place::8] = planes[place * count : (place + 1) * count]
    column = array("q", bytes(raw))
    if sys.byteorder == "big":
        column.byteswap()
    return list(accumulate(column))
