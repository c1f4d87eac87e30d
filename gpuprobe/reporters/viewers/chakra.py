"""The communication of a step as Chakra execution traces, for simulators such as ASTRA-sim.

The format: MLCommons Chakra, ``schema/protobuf/et_def.proto`` (fields and enumerations below have
its numbers); a file is a ``GlobalMetadata`` and then one ``Node`` for each operation, each message
after its length as a varint. Attributes have the types that Chakra's own reader expects
(``src/feeder/et_feeder_node.cpp``). ``comm_size`` is what the rank passes in, in bytes: of an
all-gather its own part. ``pg_name`` is the number of a group in the table of groups, which
ASTRA-sim reads as its ``comm-group-configuration``.

A node depends on the last node that the rank waited for, and on the last operation of its group.
Nodes between them are the time in which the rank computed, if it was measured.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import IO, Final

from gpuprobe.errors import DataError
from gpuprobe.model.run.communication import CollectiveRecord, group_ranks

VERSION: Final = "0.0.4"
"""The version of the schema, as Chakra's generator writes it (``src/generator/generator.py``)."""

MOST_MEMBERS: Final = 1 << 22
"""The most members of all groups of a job: a thousand groups of four thousand ranks."""

_COMP, _SEND, _RECV, _COLL = 4, 5, 6, 7  # enum NodeType
_KINDS: Final = {
    "all_reduce": 0,
    "reduce": 1,
    "all_gather": 2,
    "gather": 3,
    "scatter": 4,
    "broadcast": 5,
    "all_to_all": 6,
    "reduce_scatter": 7,
    "barrier": 9,
}
"""enum CollectiveCommType."""

_VARINT, _BYTES = 0, 2  # wire types of protobuf
_INT32, _INT64, _BOOL, _STRING = 7, 9, 27, 29  # fields of AttributeProto


def groups_of(ranks: Iterable[Sequence[CollectiveRecord]]) -> dict[str, tuple[int, ...]]:
    """The ranks of each group, by its `group_text`; a group's number is its place, from 1.

    Raises DataError for impossible groups, with more than `MOST_MEMBERS` members in total.
    """
    sizes = {record.members: record.ranks for records in ranks for record in records}
    found: dict[str, tuple[int, ...]] = {}
    left = MOST_MEMBERS
    for text, size in sizes.items():
        members = group_ranks(text, min(size, left + 1))
        left -= len(members)
        if left < 0:
            raise DataError(f"damaged recording: groups of more than {MOST_MEMBERS:,} ranks")
        if members:
            found[text] = members
    return dict(sorted(found.items(), key=lambda item: item[1]))


def write_groups(groups: Mapping[str, Sequence[int]], stream: IO[str]) -> None:
    """The table of groups: their numbers and ranks, as JSON."""
    table = {str(number): list(members) for number, members in enumerate(groups.values(), 1)}
    json.dump(table, stream, indent=1)
    stream.write("\n")


def write(
    records: Sequence[CollectiveRecord],
    rank: int,
    groups: Mapping[str, Sequence[int]],
    stream: IO[bytes],
    *,
    start_ns: int = 0,
    timed: bool = True,
) -> None:
    """Write the trace of one rank: the operations of a step that started at ``start_ns``.
    ``timed``: the times are measured on hardware.
    """
    stream.write(_delimited(_text(1, VERSION)))
    numbers = {text: number for number, text in enumerate(groups, 1)}
    for node in _nodes(records, rank, numbers, start_ns if timed else None):
        stream.write(_delimited(node))


def _nodes(
    records: Sequence[CollectiveRecord],
    rank: int,
    groups: Mapping[str, int],
    free_ns: int | None,
) -> Iterator[bytes]:
    """The nodes. ``free_ns``: the time since which the rank computes; None without times."""
    number = 0
    waited = 0  # the last node that the rank waited for
    last: dict[str, int] = {}  # node of each group
    for record in records:
        arrival, completion = record.arrival_ns, record.completion_ns
        arrived = arrival if isinstance(arrival, int) else None
        over = completion if isinstance(completion, int) else None
        if free_ns is not None and arrived is not None and arrived - free_ns >= 1000:
            number += 1
            yield _node(
                number,
                "compute",
                _COMP,
                [waited] if waited else [],
                (free_ns, arrived),
                [_attribute("is_cpu_op", _BOOL, 0)],
            )
            waited = number
            free_ns = arrived
        number += 1
        members = record.members
        needs = sorted({node for node in (waited, last.get(members, 0)) if node})
        span = None
        if free_ns is not None and arrived is not None and over is not None:
            span = (arrived, over)
        name = f"{record.op} {record.axis}".rstrip()
        yield _node(number, name, _type(record), needs, span, _attributes(record, rank, groups))
        last[members] = number
        if over is not None:
            waited = number
            free_ns = over if free_ns is not None else None


def _type(record: CollectiveRecord) -> int:
    return {"send": _SEND, "recv": _RECV}.get(record.op, _COLL)


def _attributes(record: CollectiveRecord, rank: int, groups: Mapping[str, int]) -> list[bytes]:
    size = int(record.payload)
    if record.op in ("all_gather", "gather") and record.ranks:
        size //= record.ranks
    found = [_attribute("is_cpu_op", _BOOL, 0), _attribute("comm_size", _INT64, size)]
    peer = record.peer
    if record.op in ("send", "recv"):
        if isinstance(peer, int):
            source, target = (rank, peer) if record.op == "send" else (peer, rank)
            found += [
                _attribute("comm_src", _INT32, source),
                _attribute("comm_dst", _INT32, target),
            ]
        found.append(_attribute("comm_tag", _INT32, 0))
    else:
        kind = _KINDS.get(record.op)
        if kind is not None:
            found.append(_attribute("comm_type", _INT64, kind))
        number = groups.get(record.members)
        if number is not None:
            found.append(_attribute("pg_name", _STRING, str(number)))
    found.append(_attribute("place", _STRING, str(record.place)))
    if record.module:
        found.append(_attribute("module", _STRING, record.module))
    return found


# -- messages


def _node(
    number: int,
    name: str,
    kind: int,
    needs: Sequence[int],
    span: tuple[int, int] | None,
    attributes: Iterable[bytes],
) -> bytes:
    parts = [_number(1, number), _text(2, name), _number(3, kind)]
    if needs:
        parts.append(_message(5, b"".join(map(_varint, needs))))  # data_deps, packed
    if span is not None:
        start, end = span
        parts += [_number(6, start // 1000), _number(7, max(0, end - start) // 1000)]
    parts += [_message(10, attribute) for attribute in attributes]
    return b"".join(parts)


def _attribute(name: str, field: int, value: int | str) -> bytes:
    """An attribute. A value of 0 is written, too, because it is a member of a ``oneof``."""
    held = _text(field, value) if isinstance(value, str) else _tag(field, _VARINT) + _varint(value)
    return _text(1, name) + held


def _number(field: int, value: int) -> bytes:
    return _tag(field, _VARINT) + _varint(value) if value else b""


def _text(field: int, value: str) -> bytes:
    return _message(field, value.encode("utf-8", "backslashreplace"))


def _message(field: int, data: bytes) -> bytes:
    return _tag(field, _BYTES) + _varint(len(data)) + data


def _tag(field: int, kind: int) -> bytes:
    return _varint(field << 3 | kind)


def _varint(value: int) -> bytes:
    parts = bytearray()
    while value > 0x7F:
        parts.append(0x80 | value & 0x7F)
        value >>= 7
    parts.append(value)
    return bytes(parts)


def _delimited(message: bytes) -> bytes:
    return _varint(len(message)) + message
