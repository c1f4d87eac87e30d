"""The first collective of each process group that cannot end, from the dumps of its ranks.

All ranks of a group call the same collectives in the same order, which torch numbers
(``collective_seq_id``). So the first number at which ranks differ is where the job went wrong:
ranks that have not called it are missing, and ranks that called another collective, or the same
with other shapes, do not match. A dump holds the last entries of a rank only: earlier numbers are
not compared.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Final

from gpuprobe.analysis.trace.frames import is_user_frame
from gpuprobe.model.place import NoPlace, Place, SourceLine
from gpuprobe.model.run.hang import MISMATCH, MISSING, STUCK, FlightEntry, Hang, HangSide
from gpuprobe.model.trace import Frame

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


def find_hangs(
    entries: Mapping[int, Sequence[FlightEntry]], members: Mapping[tuple[str, str], str]
) -> tuple[int, tuple[Hang, ...]]:
    """The number of groups, and what is wrong in them, the earliest in the job first.

    ``entries``: what each rank called. ``members``: the ranks of a group, by its name and
    description, as text like ``[0, 1]``.
    """
    groups: dict[tuple[str, str, str], dict[int, dict[int, FlightEntry]]] = {}
    for rank, called in entries.items():
        for entry in called:
            if not entry.is_p2p:
                name, desc = entry.process_group
                # gloo's groups have neither name nor description (torch 2.13).
                known = (members.get(key) for key in ((name, desc), ("", desc), ("", "")))
                ranks = next(filter(None, known), "")
                by_rank = groups.setdefault((name, desc, ranks), {})
                by_rank.setdefault(rank, {})[entry.collective_seq_id] = entry
    found = [
        hang
        for (name, desc, ranks), by_rank in groups.items()
        if (hang := _hang(desc or name, _ranks(ranks) or sorted(by_rank), by_rank, entries))
    ]
    order = (MISMATCH, MISSING, STUCK)
    return len(groups), tuple(sorted(found, key=lambda hang: (order.index(hang.kind), hang.group)))


def _ranks(text: str) -> list[int]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return []
    if not isinstance(found, list):
        return []
    return sorted({rank for rank in found if isinstance(rank, int) and rank >= 0})


def _hang(
    group: str,
    members: Sequence[int],
    by_rank: Mapping[int, Mapping[int, FlightEntry]],
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
        if len({_what(entry) for entry in here.values()}) > 1:
            return Hang(MISMATCH, group, number, sides, (), no_dump)
        absent = [rank for rank, newest in last.items() if newest < number]
        if absent:
            before = {rank: by_rank[rank][last[rank]] for rank in absent if rank in by_rank}
            never = tuple(rank for rank in absent if rank not in by_rank)
            asleep = _sides(before)
            if never:
                asleep += (HangSide(never, "", None, NoPlace.UNKNOWN, ""),)
            return Hang(MISSING, group, number, sides, asleep, no_dump)
        waiting = [entry for entry in here.values() if _is_open(entry)]
        if waiting:
            kind = MISSING if no_dump else STUCK
            return Hang(kind, group, number, sides, (), no_dump)
    if no_dump:  # whoever left no dump may be the one that the others wait for
        number = max(last.values())
        here = {rank: by_rank[rank][number] for rank in by_rank if number in by_rank[rank]}
        return Hang(MISSING, group, number, _sides(here), (), no_dump)
    return None


def _is_open(entry: FlightEntry) -> bool:
    """gloo's entries stay scheduled for ever."""
    return entry.state in _OPEN and not entry.profiling_name.startswith("gloo:")


def _what(entry: FlightEntry) -> str:
    """What has to be the same on all ranks."""
    name = entry.profiling_name.rpartition(":")[2]
    return _shown(entry) if name in _SAME_SHAPES else name


def _shown(entry: FlightEntry) -> str:
    name = entry.profiling_name.rpartition(":")[2]
    sizes = " ".join("x".join(map(str, size)) or "scalar" for size in entry.input_sizes[:3])
    more = " …" if len(entry.input_sizes) > 3 else ""
    types = " ".join(dict.fromkeys(entry.input_dtypes))
    return " ".join(part for part in (name, sizes + more, types) if part)


def _sides(here: Mapping[int, FlightEntry]) -> tuple[HangSide, ...]:
    """Ranks that do the same at the same line together, the most first."""
    sides: dict[tuple[str, int, SourceLine, str], list[int]] = {}
    for rank, entry in sorted(here.items()):
        key = (_shown(entry), entry.collective_seq_id, _place(entry), entry.state)
        sides.setdefault(key, []).append(rank)
    made = [
        HangSide(tuple(ranks), op, number, place, state)
        for (op, number, place, state), ranks in sides.items()
    ]
    return tuple(sorted(made, key=lambda side: (-len(side.ranks), side.ranks)))


def _place(entry: FlightEntry) -> SourceLine:
    """The innermost line of the program; of no program, the innermost line."""
    frames = [Frame(f.filename, f.line, f.name) for f in entry.frames]
    frame = next((f for f in frames if is_user_frame(f)), frames[0] if frames else None)
    return NoPlace.UNKNOWN if frame is None else Place(frame.filename, frame.line, frame.name)
