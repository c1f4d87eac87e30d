"""The first collective of each process group that cannot finish, from the dumps of its ranks.

All ranks of a group call the same collectives in the same order, which torch numbers
(``collective_seq_id``). So the first number at which ranks differ is the cause of a hang: ranks
that have not called it are missing, and ranks that called another collective, or the same one with
other shapes, do not match. A dump only has the last entries of a rank: earlier numbers are not
compared.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final

from gpuprobe.model.place import NoPlace, SourceLine
from gpuprobe.model.run.communication import CollectiveRecord, group_ranks
from gpuprobe.model.run.jobs import MISMATCH, MISSING, STUCK, Arrivals, Hang, HangSide

_SAME_SHAPES: Final = (
    "all_reduce",
    "allreduce_coalesced",
    "broadcast",
    "reduce",
    "_all_gather_base",
    "_reduce_scatter_base",
    "all_gather_into_tensor_coalesced",
    "reduce_scatter_tensor_coalesced",
)
"""Operations whose inputs have the same sizes on all ranks. Those of others (scatter, gather,
all-to-all, lists of tensors) may differ."""

_OPEN: Final = ("scheduled", "started")


_MOST_MEMBERS: Final = 1 << 20


def find_hangs(
    called: Mapping[int, Sequence[CollectiveRecord]],
) -> tuple[int, tuple[Hang, ...]]:
    """The number of groups, and their hangs: mismatches first, then missing ranks. ``called``: the
    collectives of each rank.
    """
    groups = by_group(called)
    found = []
    for (name, described, ranks), by_rank in groups.items():
        members = sorted(group_ranks(ranks, _MOST_MEMBERS)) or sorted(by_rank)
        hang = _hang(described or name, members, by_rank, called)
        if hang is not None:
            found.append(hang)
    order = (MISMATCH, MISSING, STUCK)
    return len(groups), tuple(sorted(found, key=lambda hang: (order.index(hang.kind), hang.group)))


def by_group(
    called: Mapping[int, Sequence[CollectiveRecord]],
) -> dict[tuple[str, str, str], dict[int, dict[int, CollectiveRecord]]]:
    """The collectives of each group (name, description, ranks), by rank and number; without sends
    and receives, which are not collectives.
    """
    groups: dict[tuple[str, str, str], dict[int, dict[int, CollectiveRecord]]] = {}
    for rank, records in called.items():
        for one in records:
            if one.op not in ("send", "recv"):
                by_rank = groups.setdefault((one.group, one.described, one.members), {})
                by_rank.setdefault(rank, {})[one.sequence] = one
    return groups


def arrivals(called: Mapping[int, Sequence[CollectiveRecord]]) -> tuple[Arrivals, ...]:
    """How often each rank was the last to arrive, the most often first; ranks that never were have
    no row.
    """
    counted: Counter[int] = Counter()
    last: Counter[int] = Counter()
    late: Counter[int] = Counter()
    for (_, _, ranks), by_rank in by_group(called).items():
        members = group_ranks(ranks, _MOST_MEMBERS)
        if len(members) < 2 or set(members) != set(by_rank):
            continue
        for number in set.intersection(*(set(calls) for calls in by_rank.values())):
            arrived = sorted(
                (at, rank)
                for rank in members
                if isinstance(at := by_rank[rank][number].arrival_ns, int)
            )
            if len(arrived) < len(members):
                continue
            counted.update(members)
            (before, _), (at, rank) = arrived[-2:]
            last[rank] += 1
            late[rank] += at - before
    return tuple(
        Arrivals(rank, counted[rank], number, late[rank])
        for rank, number in sorted(last.items(), key=lambda item: (-item[1], item[0]))
    )


def _hang(
    group: str,
    members: Sequence[int],
    by_rank: Mapping[int, Mapping[int, CollectiveRecord]],
    dumped: Mapping[int, object],
) -> Hang | None:
    no_dump = tuple(rank for rank in members if rank not in dumped)
    last = {rank: max(by_rank.get(rank, {0: None})) for rank in members if rank in dumped}
    if not last:
        return None
    first = max(min(calls) for calls in by_rank.values())
    for number in range(first, max(last.values()) + 1):
        here = {rank: by_rank[rank][number] for rank in by_rank if number in by_rank[rank]}
        sides = _sides(here)
        if len({_signature(entry) for entry in here.values()}) > 1:
            return Hang(MISMATCH, group, number, sides, (), no_dump)
        absent = [rank for rank, newest in last.items() if newest < number]
        if absent:
            before = {rank: by_rank[rank][last[rank]] for rank in absent if rank in by_rank}
            never = tuple(rank for rank in absent if rank not in by_rank)
            missing_sides = _sides(before)
            if never:
                missing_sides += (HangSide(never, "", None, NoPlace.UNKNOWN, ""),)
            return Hang(MISSING, group, number, sides, missing_sides, no_dump)
        waiting = [entry for entry in here.values() if _is_open(entry)]
        if waiting:
            kind = MISSING if no_dump else STUCK
            return Hang(kind, group, number, sides, (), no_dump)
    if no_dump:  # the others may wait for a rank without a dump
        number = max(last.values())
        here = {rank: by_rank[rank][number] for rank in by_rank if number in by_rank[rank]}
        return Hang(MISSING, group, number, _sides(here), (), no_dump)
    return None


def _is_open(entry: CollectiveRecord) -> bool:
    """Whether an entry has not finished. Entries of gloo stay scheduled forever and do not
    count."""
    return entry.state in _OPEN and not entry.function.startswith("gloo:")


def _signature(entry: CollectiveRecord) -> str:
    """The properties that must be equal on all ranks: the function and, for some, the shapes."""
    name = entry.function.rpartition(":")[2]
    return _call_text(entry) if name in _SAME_SHAPES else name


def _call_text(entry: CollectiveRecord) -> str:
    name = entry.function.rpartition(":")[2]
    return " ".join(part for part in (name, entry.shapes) if part)


def _sides(here: Mapping[int, CollectiveRecord]) -> tuple[HangSide, ...]:
    """Group ranks that are in the same call at the same line; the largest group first."""
    sides: dict[tuple[str, int, SourceLine, str], list[int]] = {}
    for rank, entry in sorted(here.items()):
        key = (_call_text(entry), entry.sequence, entry.place, entry.state)
        sides.setdefault(key, []).append(rank)
    made = [
        HangSide(tuple(ranks), op, number, place, state)
        for (op, number, place, state), ranks in sides.items()
    ]
    return tuple(sorted(made, key=lambda side: (-len(side.ranks), side.ranks)))
