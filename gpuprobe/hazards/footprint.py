"""Which bytes an access touches: an interval, or rows of one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

__all__ = ["Footprint", "of_tensor", "overlap", "whole"]

_new: Final = tuple.__new__

_MAX_ROWS: Final = 4096
"""Rows that are compared one by one; beyond, the whole extent counts as touched."""
_MAX_STARTS: Final = 1024
"""Rows of uneven steps that are kept one by one; beyond, coarser rows are."""


class Footprint(NamedTuple):
    """Bytes ``low`` to ``high`` (exclusive). ``rows``: only ``row`` bytes at every ``step``
    bytes, ``rows`` times; 1 row is the whole interval. ``starts``: where each row begins, from
    the lowest, if the steps between them are uneven.
    """

    low: int
    high: int
    rows: int = 1
    step: int = 0
    row: int = 0
    starts: tuple[int, ...] = ()

    def pieces(self) -> Iterator[tuple[int, int]]:
        if self.starts:
            for start in self.starts:
                yield start, start + self.row
            return
        if self.rows == 1:
            yield self.low, self.high
            return
        for at in range(self.rows):
            start = self.low + at * self.step
            yield start, start + self.row


def whole(low: int, high: int) -> Footprint:
    """``Footprint(low, high)``, in half the time: nearly all are."""
    return _new(Footprint, (low, high, 1, 0, 0, ()))


def of_tensor(
    address: int, sizes: Sequence[int], strides: Sequence[int], itemsize: int
) -> Footprint | None:
    """The bytes of a strided tensor whose first element lies at ``address``. None: no bytes.

    Exact for tensors that are dense up to outer dimensions that step evenly, and for others of
    up to 1,024 dense rows; beyond, whole rows of the largest stride count.
    """
    dims = []
    for size, stride in zip(sizes, strides, strict=True):
        if size == 0:
            return None
        if size > 1 and stride != 0:
            dims.append((abs(stride), size))
    dims.sort()
    dense = 1  # elements of the inner part without holes
    at = 0
    while at < len(dims) and dims[at][0] == dense:
        dense *= dims[at][1]
        at += 1
    rest = dims[at:]
    if not rest:
        return Footprint(address, address + dense * itemsize)
    extent = dense + sum(stride * (size - 1) for stride, size in rest)
    high = address + extent * itemsize
    # Outer dimensions that step evenly are one dimension.
    step, rows = rest[0]
    for stride, size in rest[1:]:
        if stride != step * rows:
            starts = _starts(address, rest, itemsize)
            if starts:
                return Footprint(address, high, len(starts), 0, dense * itemsize, starts)
            # Too many: rows of the largest stride, each taken whole.
            inner = dense + sum(s * (n - 1) for s, n in rest[:-1])
            step, rows = rest[-1]
            if rows > _MAX_ROWS or inner > step:
                return Footprint(address, high)
            return Footprint(address, high, rows, step * itemsize, inner * itemsize)
        rows *= size
    if rows > _MAX_ROWS or dense > step:
        return Footprint(address, high)
    return Footprint(address, high, rows, step * itemsize, dense * itemsize)


def _starts(address: int, dims: Sequence[tuple[int, int]], itemsize: int) -> tuple[int, ...]:
    """Addresses of all rows, in order; empty if there are too many."""
    count = 1
    for _, size in dims:
        count *= size
    if count > _MAX_STARTS:
        return ()
    starts = [address]
    for stride, size in dims:
        starts = [start + at * stride * itemsize for at in range(size) for start in starts]
    return tuple(sorted(starts))


def overlap(one: Footprint, other: Footprint) -> bool:
    """Whether two accesses touch a byte in common."""
    if one.low >= other.high or other.low >= one.high:
        return False
    if one.rows == 1 and other.rows == 1:
        return True
    if one.starts or other.starts:
        return _meet(one.pieces(), other.pieces())
    if one.rows > other.rows:
        one, other = other, one
    # ``other`` has the more rows: find, for each piece of the one, the row it could meet.
    for start, end in one.pieces():
        if other.rows == 1:
            if start < other.high and other.low < end:
                return True
            continue
        first = max(0, (start - other.low - other.row) // other.step)
        for at in range(first, other.rows):
            begin = other.low + at * other.step
            if begin >= end:
                break
            if start < begin + other.row:
                return True
    return False


def _meet(ones: Iterator[tuple[int, int]], others: Iterator[tuple[int, int]]) -> bool:
    """Whether intervals of two ordered lists overlap."""
    one, other = next(ones, None), next(others, None)
    while one is not None and other is not None:
        if one[0] < other[1] and other[0] < one[1]:
            return True
        if one[1] <= other[1]:
            one = next(ones, None)
        else:
            other = next(others, None)
    return False
