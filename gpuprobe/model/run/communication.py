"""What ranks send to each other: one record for each collective of a rank.

A record comes from a recorded run or from a simulated rank; analyses treat both alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Final

from gpuprobe.errors import DataError
from gpuprobe.model.place import NoPlace, Place, SourceLine, parse_place
from gpuprobe.model.record import record
from gpuprobe.model.text import ranges
from gpuprobe.model.values import Bytes, Count, Nanoseconds, Parsed, Rank, Unavailable, World

_NOT_COLLECTED = Unavailable("not collected")

# Of the payload, what one of N ranks sends: the factor, a fraction, as a function of N.
_WIRE: Final[dict[str, Callable[[int], tuple[int, int]]]] = {
    "all_gather": lambda n: (n - 1, n),
    "all_reduce": lambda n: (2 * (n - 1), n),
    "all_to_all": lambda n: (n - 1, n),
    "barrier": lambda n: (0, 1),
    "broadcast": lambda n: (1, 1),
    "gather": lambda n: (n - 1, n),
    "recv": lambda n: (0, 1),
    "reduce": lambda n: (1, 1),
    "reduce_scatter": lambda n: (n - 1, n),
    "scatter": lambda n: (n - 1, n),
    "send": lambda n: (1, 1),
}
"""Source: nccl-tests, ``doc/PERFORMANCE.md``, where these are the factors from time to bus
bandwidth: the share of the payload that every link of a ring carries."""


def wire_bytes(op: str, payload: int, ranks: int) -> Bytes:
    """Bytes that one rank sends over its links for an operation in a group of ``ranks``; for gather
    and scatter, what the root's link carries. Rounded down. Raises KeyError for an unknown
    operation.
    """
    above, below = _WIRE[op](ranks)
    return Bytes(0 if ranks < 2 else payload * above // below)


@dataclass(frozen=True, slots=True)
class CollectiveRecord:
    """One collective operation of one rank.

    ``group`` names the process group, ``axis`` the dimension of the device mesh that it belongs to,
    "" without a mesh. ``sequence`` counts the group's operations from 1. ``payload`` is the data of
    the operation: for an all-gather all that is gathered, for a reduce-scatter all that is reduced,
    otherwise the tensors passed to it. ``wire`` is what this rank sends over its
    links (`wire_bytes`). Times are nanoseconds from the start of the session: ``arrival_ns`` is
    when this rank called it, ``completion_ns`` when the call returned, of a call that blocks until
    the operation is over. ``members`` are the ranks of the group (`group_text`), "" if they are
    unknown, and ``peer`` is the rank that a send or receive is to or from.
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
    members: str = ""
    peer: int | Unavailable = _NOT_COLLECTED


@record(frozen=True, slots=True)
class Exchange:
    """Operations of one step that differ in their times only: how a recording has the
    `CollectiveRecord` of each. ``place`` is the text of a place. ``sequence`` and the times have an
    item for each operation; a time of 0 is unknown.
    """

    group: str
    ranks: Count
    op: str
    payload: Bytes
    wire: Bytes
    place: str
    axis: str = ""
    dtype: str = ""
    module: str = ""
    members: str = ""
    peer: Rank | Unavailable = _NOT_COLLECTED
    sequence: tuple[Count, ...] = ()
    arrival_ns: tuple[Nanoseconds, ...] = ()
    completion_ns: tuple[Nanoseconds, ...] = ()


MOST_OPERATIONS: Final = 10_000
"""The most operations of one step that are recorded one by one: in a step of a large model, ranks
exchange a few hundred to a few thousand operations."""


def operations(exchanges: Iterable[Exchange]) -> int:
    """How many they are."""
    return sum(len(one.sequence) for one in exchanges)


def check_operations(exchanges: Iterable[Exchange]) -> None:
    """Raises DataError for more operations than a recording has of a step."""
    if operations(exchanges) > MOST_OPERATIONS:
        raise DataError(f"a step with more than {MOST_OPERATIONS:,} operations with other ranks")


def exchanges_of(records: Iterable[CollectiveRecord]) -> tuple[Exchange, ...]:
    """The records of one step, in the order of their first operations."""
    rows: dict[tuple[object, ...], tuple[CollectiveRecord, list[int], list[int], list[int]]] = {}
    for one in records:
        key = (one.group, one.op, one.payload, one.place, one.dtype, one.module, one.peer)
        _, sequence, arrival, completion = rows.setdefault(key, (one, [], [], []))
        sequence.append(one.sequence)
        arrival.append(one.arrival_ns if isinstance(one.arrival_ns, int) else 0)
        completion.append(one.completion_ns if isinstance(one.completion_ns, int) else 0)
    return tuple(
        Exchange(
            group=first.group,
            ranks=first.ranks,
            op=first.op,
            payload=first.payload,
            wire=first.wire,
            place=str(first.place),
            axis=first.axis,
            dtype=first.dtype,
            module=first.module,
            members=first.members,
            peer=first.peer,
            sequence=tuple(sequence),
            arrival_ns=tuple(arrival),
            completion_ns=tuple(completion),
        )
        for first, sequence, arrival, completion in rows.values()
    )


def records_of(exchanges: Iterable[Exchange]) -> list[CollectiveRecord]:
    """The record of each operation, in the order in which this rank called them; those whose time
    is unknown come last.
    """
    found = [
        CollectiveRecord(
            one.group,
            one.axis,
            one.ranks,
            sequence,
            one.op,
            one.dtype,
            one.payload,
            one.wire,
            parse_place(one.place),
            one.module,
            arrival or _NOT_COLLECTED,
            completion or _NOT_COLLECTED,
            one.members,
            one.peer,
        )
        for one in exchanges
        for sequence, arrival, completion in zip(
            one.sequence, one.arrival_ns, one.completion_ns, strict=False
        )
    ]
    unknown = 1 << 63
    found.sort(key=lambda r: r.arrival_ns if isinstance(r.arrival_ns, int) else unknown)
    return found


def group_text(ranks: Sequence[int]) -> str:
    """The ranks of a group as text: ``0-3,8``; with a stride, as of a dimension of a mesh,
    ``0-24:8``.
    """
    step = ranks[1] - ranks[0] if len(ranks) > 2 else 1
    if step > 1 and list(ranks) == list(range(ranks[0], ranks[-1] + 1, step)):
        return f"{ranks[0]}-{ranks[-1]}:{step}"
    return ranges(ranks, ",")


def _place(plain: str | Place) -> SourceLine:
    """A place from the data of one, which may be its text."""
    return parse_place(plain) if isinstance(plain, str) else plain


@dataclass(frozen=True, slots=True)
class Transfer:
    """The operations of one kind, called at one place, in one step: a row of a table."""

    op: str
    axis: Annotated[str, 'of the device mesh, "" without one']
    ranks: World
    dtype: str
    count: Count
    payload: Bytes
    wire: Bytes
    place: Annotated[SourceLine, Parsed(str | Place, _place)]
    module: str


@record(frozen=True)
class Communication:
    """What one rank sent to others in one step, in a row for each kind of operation, place and
    module.
    """

    rank: int
    step: int
    rows: tuple[Transfer, ...]
