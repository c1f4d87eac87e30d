"""The bytes that an access touches: an interval, or pieces of one with a tensor's strides."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

_new: Final = tuple.__new__

_MAX_STEPS: Final = 20_000
"""Comparisons of parts after which two footprints count as overlapping."""

_Dims = tuple[tuple[int, int], ...]


class Footprint(NamedTuple):
    """Bytes ``low`` to ``high`` (exclusive). ``rows``: the number of pieces that are touched, of
    ``row`` bytes each; 1 means the whole interval. ``dims``: bytes from piece to piece and the
    number of pieces, for each dimension that leaves holes, the largest steps first.
    """

    low: int
    high: int
    rows: int = 1
    row: int = 0
    dims: _Dims = ()


def whole(low: int, high: int) -> Footprint:
    """``Footprint(low, high)``, in half the time: nearly all footprints are intervals."""
    return _new(Footprint, (low, high, 1, 0, ()))


def of_tensor(
    address: int, sizes: Sequence[int], strides: Sequence[int], itemsize: int
) -> Footprint | None:
    """The bytes of a strided tensor whose first element is at ``address``. None: no bytes."""
    dims = []
    for size, stride in zip(sizes, strides, strict=True):
        if size == 0:
            return None
        if size > 1 and stride != 0:
            dims.append((abs(stride), size))
    dims.sort()
    dense = 1  # elements of the inner part without holes
    at = 0
    while at < len(dims) and dims[at][0] <= dense:
        dense += dims[at][0] * (dims[at][1] - 1)
        at += 1
    if at == len(dims):
        return whole(address, address + dense * itemsize)
    rest = [dims[at]]
    for stride, size in dims[at + 1 :]:
        step, count = rest[-1]
        if stride == step * count:  # evenly spaced: one dimension
            rest[-1] = (step, count * size)
        else:
            rest.append((stride, size))
    rows = 1
    extent = dense
    for stride, size in rest:
        rows *= size
        extent += stride * (size - 1)
    return Footprint(
        address,
        address + extent * itemsize,
        rows,
        dense * itemsize,
        tuple((stride * itemsize, size) for stride, size in reversed(rest)),
    )


def overlap(one: Footprint, other: Footprint) -> bool:
    """Whether two accesses touch a byte in common. Exact, except for patterns that do not repeat
    and would take too long to compare: those count as overlapping.
    """
    if one.low >= other.high or other.low >= one.high:
        return False
    if one.rows == 1 and other.rows == 1:
        return True
    return _Meeting(one, other).meet(other.low - one.low, 0, 0)


class _Meeting:
    """Compares two footprints part by part, from the largest steps to the smallest. The result for
    a pair of parts holds for each such pair at the same distance.
    """

    __slots__ = ("apart", "dims", "extents", "left")

    def __init__(self, one: Footprint, other: Footprint) -> None:
        self.dims = (one.dims, other.dims)
        self.extents = (_extents(one), _extents(other))
        self.apart: set[tuple[int, int, int]] = set()
        self.left = _MAX_STEPS

    def meet(self, distance: int, at: int, to: int) -> bool:
        """Whether a part of the first footprint without ``at`` outer dimensions overlaps a part of
        the second without ``to`` ones, which begins ``distance`` bytes after it.
        """
        mine, yours = self.extents[0][at], self.extents[1][to]
        if distance >= mine or distance + yours <= 0:
            return False
        dims, others = self.dims
        if at == len(dims) and to == len(others):
            return True
        pair = (distance, at, to)
        if pair in self.apart:
            return False
        self.left -= 1
        if self.left < 0:
            return True
        step = dims[at][0] if at < len(dims) else 0
        stride = others[to][0] if to < len(others) else 0
        # Part k of the first footprint and part l of the second are l - k steps further apart.
        low = high = 0
        if step >= stride:
            low = 1 - dims[at][1]
        if stride >= step:
            high = others[to][1] - 1
        at, to, width = at + (step >= stride), to + (stride >= step), max(step, stride)
        mine, yours = self.extents[0][at], self.extents[1][to]
        low = max(low, -((distance + yours - 1) // width))
        high = min(high, (mine - 1 - distance) // width)
        for shift in range(low, high + 1):
            if self.meet(distance + shift * width, at, to):
                return True
        self.apart.add(pair)
        return False


def _extents(where: Footprint) -> list[int]:
    """Bytes from the first to the last: of all dimensions, and without each next one."""
    extents = [where.row if where.rows > 1 else where.high - where.low]
    for step, count in reversed(where.dims):
        extents.append(extents[-1] + step * (count - 1))
    return extents[::-1]
