"""The amounts that ranks send, by operation, by axis of the device mesh, by module and by line."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import islice
from typing import Final

from gpuprobe.model.run.communication import CollectiveRecord, Communication, Transfer, records_of
from gpuprobe.model.run.recording import RankRecording
from gpuprobe.model.run.session import Step
from gpuprobe.model.values import Bytes

Key = tuple[str, str, int, str, object, str]


def transfers(records: Iterable[CollectiveRecord]) -> tuple[Transfer, ...]:
    """Sum up equal operations into rows; the most bytes on the wire first."""
    sums: dict[Key, list[int]] = {}
    for one in records:
        key = (one.op, one.axis, one.ranks, one.dtype, one.place, one.module)
        found = sums.setdefault(key, [0, 0, 0])
        found[0] += 1
        found[1] += one.payload
        found[2] += one.wire
    rows = [
        Transfer(op, axis, ranks, dtype, count, Bytes(payload), Bytes(wire), place, module)  # type: ignore[arg-type]
        for (op, axis, ranks, dtype, place, module), (count, payload, wire) in sums.items()
    ]
    return tuple(
        sorted(rows, key=lambda row: (-row.wire, -row.payload, row.op, str(row.place), row.module))
    )


_FIRST_STEPS: Final = 64
"""Steps that are searched for single operations: recordings have them for the first three steps,
unless others were chosen."""


def detailed_steps(rank: RankRecording) -> list[Step]:
    """The steps whose operations were recorded one by one."""
    return [step for step in islice(rank.steps, _FIRST_STEPS) if step.exchanges]


def detailed_step(rank: RankRecording) -> Step | None:
    """The last whole step of `detailed_steps`; None if there is none."""
    some = detailed_steps(rank)
    whole = [step for step in some if step.ended_by != "end"]
    return next(reversed(whole or some), None)


def communication_of(rank: RankRecording) -> Communication | None:
    """The communication of a rank in its `detailed_step`; None if there is none."""
    step = detailed_step(rank)
    if step is None:
        return None
    return Communication(rank.session.rank, step.index, transfers(records_of(step.exchanges)))


BY: Final[dict[str, Callable[[Transfer], str]]] = {
    "operation": lambda row: f"{row.op} {row.axis}".rstrip() + f", {row.ranks} ranks, {row.dtype}",
    "line": lambda row: str(row.place),
    "module": lambda row: row.module or "(no module)",
}
"""The breakdowns of transfers: the name of the row that a transfer belongs to."""


def summed(rows: Iterable[Transfer], by: str) -> list[tuple[str, int, int, int]]:
    """Sum up rows by one of `BY`: (name, count, payload, wire), the most bytes on the wire first.
    All breakdowns sum to the same totals.
    """
    name = BY[by]
    sums: dict[str, list[int]] = {}
    for row in rows:
        found = sums.setdefault(name(row), [0, 0, 0])
        found[0] += row.count
        found[1] += row.payload
        found[2] += row.wire
    ordered = sorted(sums.items(), key=lambda item: (-item[1][2], -item[1][1], item[0]))
    return [(key, count, payload, wire) for key, (count, payload, wire) in ordered]
