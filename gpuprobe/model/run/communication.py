"""What ranks send to each other: one record for each collective of a rank, whoever saw it.

A record comes from a watched run, from a rank that is pretended, or from somebody else's dump; what
is computed of records does not ask which.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Final

from gpuprobe.model.bounds import Count
from gpuprobe.model.place import NoPlace, SourceLine
from gpuprobe.model.values import Bytes, Unavailable

_NOT_COLLECTED = Unavailable("not collected")

# Of the payload, what one of N ranks sends: the factor, as a function of N.
_WIRE: Final = {
    "all_gather": lambda n: Fraction(n - 1, n),
    "all_reduce": lambda n: Fraction(2 * (n - 1), n),
    "all_to_all": lambda n: Fraction(n - 1, n),
    "barrier": lambda n: Fraction(0),
    "broadcast": lambda n: Fraction(1),
    "gather": lambda n: Fraction(n - 1, n),
    "recv": lambda n: Fraction(0),
    "reduce": lambda n: Fraction(1),
    "reduce_scatter": lambda n: Fraction(n - 1, n),
    "scatter": lambda n: Fraction(n - 1, n),
    "send": lambda n: Fraction(1),
}
"""Source: nccl-tests, ``doc/PERFORMANCE.md``, where these are the factors from time to bus
bandwidth: the share of the payload that every link of a ring carries."""


def wire_bytes(op: str, payload: int, ranks: int) -> Bytes:
    """What one rank sends over its links for an operation in a group of so many; of gather and
    scatter, what the root's link carries. Bytes, rounded down. Raises KeyError for an operation
    that is not known.
    """
    return Bytes(0 if ranks < 2 else int(payload * _WIRE[op](ranks)))


@dataclass(frozen=True, slots=True)
class CollectiveRecord:
    """One collective operation of one rank.

    ``group`` names the process group, ``axis`` the dimension of the device mesh that it belongs to,
    "" where there is no mesh. ``sequence`` counts the group's operations from 1. ``payload`` is
    what the operation is about: of an all-gather all that is gathered, of a reduce-scatter all that
    is summed up, otherwise the tensors that are given. ``wire`` is what this rank sends over its
    links (`wire_bytes`). Times are nanoseconds from the start of the session.
    """

    group: str
    axis: str
    ranks: Count
    sequence: Count
    op: str
    dtype: str
    payload: Bytes
    wire: Bytes
    place: SourceLine = NoPlace.UNKNOWN
    module: str = ""
    arrival_ns: int | Unavailable = _NOT_COLLECTED
    completion_ns: int | Unavailable = _NOT_COLLECTED


@dataclass(frozen=True, slots=True)
class Transfer:
    """The operations of one kind, made at one place, in one step: a row of a table."""

    op: str
    axis: str
    ranks: Count
    dtype: str
    count: Count
    payload: Bytes
    wire: Bytes
    place: SourceLine
    module: str
