"""Throughput, speed-up and efficiency of a program on more ranks, and what the loss is made of.

All times are device time, summed over ranks: what a unit of work costs on N ranks is N times the
time that passes. Efficiency is the cost on the first recording's ranks divided by the cost on these
(27 minutes on 1 rank, 10 on 4: 27 / 40 = 67.5 %). Each rank's time is its own work, exposed
communication (in each step what even the rank that waited least spent in collectives) and waiting
for others (what it waited more than that). So the difference of two costs is the sum of the
differences of the three.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePath
from typing import NamedTuple

from gpuprobe.analysis.ranks.stragglers import full_rows
from gpuprobe.errors import DataError
from gpuprobe.model.run.columns import DURATION, MISSING, WAITED, StepColumns
from gpuprobe.model.run.recording import Recording
from gpuprobe.model.run.scaling import RUN, ScaleRow, Scaling


class _Cost(NamedTuple):
    """Device time of a recording, in nanoseconds."""

    ranks: int
    steps: int
    total: int
    communication: int | None
    waiting: int | None

    @property
    def own(self) -> int | None:
        if self.communication is None or self.waiting is None:
            return None
        return self.total - self.communication - self.waiting


def scale(recordings: Sequence[Recording], work: str) -> Scaling:
    """Compare recordings with the first; ``work`` is `STEP` or `RUN` (see `Scaling`).

    Raises DataError for a recording without comparable times: of a virtual GPU, without full steps,
    or in which ranks of the job are missing.
    """
    costs = [_cost(recording, first=work == RUN) for recording in recordings]
    units = [1 if work == RUN else cost.ranks * cost.steps for cost in costs]
    names = [PurePath(recording.path).name for recording in recordings]
    rows = [
        _row(name, cost, unit, costs[0], units[0])
        for name, cost, unit in zip(names, costs, units, strict=True)
    ]
    return Scaling(work, tuple(rows))


def _row(name: str, cost: _Cost, units: int, first: _Cost, first_units: int) -> ScaleRow:
    one, base = cost.total / units, first.total / first_units
    throughput = cost.ranks / one * 1e9
    efficiency = base / one
    parts: list[int | None] = []
    losses: list[float | None] = []
    for part, before in (
        (cost.communication, first.communication),
        (cost.waiting, first.waiting),
    ):
        known = part is not None and before is not None
        parts.append(None if part is None else round(part / units))
        losses.append((part / units - before / first_units) / one if known else None)  # type: ignore[operator]
    communication, waiting = losses
    split = communication is not None and waiting is not None
    total = round(one)
    return ScaleRow(
        name=name,
        ranks=cost.ranks,
        steps=cost.steps,
        total_ns=total,
        own_ns=None if parts[0] is None or parts[1] is None else total - parts[0] - parts[1],
        communication_ns=parts[0],
        waiting_ns=parts[1],
        throughput=throughput,
        speedup=efficiency * cost.ranks / first.ranks,
        efficiency=efficiency,
        lost=1 - efficiency,
        lost_own=1 - efficiency - communication - waiting if split else None,  # type: ignore[operator]
        lost_communication=communication,
        lost_waiting=waiting,
    )


def _cost(recording: Recording, *, first: bool) -> _Cost:
    """Over the full steps that all ranks have; without ``first`` not the first (`full_steps`)."""
    ranks = {rank.session.rank: rank for rank in recording.ranks}
    name = PurePath(recording.path).name
    if any(rank.session.virtual for rank in ranks.values()):
        raise DataError(
            f"{name}: step times on a virtual GPU are not comparable",
            hint="record on real devices; gpuprobe estimate --link models communication",
        )
    world = max((rank.session.world_size for rank in ranks.values()), default=0)
    if len(ranks) < world:
        raise DataError(
            f"{name} has {len(ranks)} of the {world} ranks of its job",
            hint="collect the files of all ranks in one directory",
        )
    rows = {number: full_rows(rank.columns, first=first) for number, rank in ranks.items()}
    common = sorted(set.intersection(*map(set, rows.values()))) if rows else []
    if not common:
        raise DataError(f"{name} has no step that every rank recorded")
    durations, waits = [], []
    for number, rank in ranks.items():
        chosen = [rows[number][index] for index in common]
        duration = rank.columns.number(*DURATION)
        waited = _waited(rank.columns, len(ranks))
        durations.append([duration[row] for row in chosen])
        waits.append(None if waited is None else [waited[row] for row in chosen])
    total = sum(map(sum, durations))
    if total <= 0:
        raise DataError(f"{name}: its steps took no time")
    known = [waited for waited in waits if waited is not None]
    communication = waiting = None
    if len(known) == len(waits):
        least = [min(step) for step in zip(*known, strict=True)]
        communication = len(known) * sum(least)
        waiting = sum(map(sum, known)) - communication
    return _Cost(len(ranks), len(common), total, communication, waiting)


def _waited(columns: StepColumns, ranks: int) -> Sequence[int] | None:
    """How long each step waited for other ranks; None where that is not known."""
    if ranks == 1:
        return [0] * columns.rows
    by_phase = [columns.number("phase_waited", path) for path in columns.phases]
    spent = [columns.number("phase", path) for path in columns.phases]
    if any(max(waited, default=MISSING) != MISSING for waited in by_phase):
        for waited, took in zip(by_phase, spent, strict=True):
            if any(w == MISSING != t for w, t in zip(waited, took, strict=True)):
                return None
        return [sum(w for w in row if w != MISSING) for row in zip(*by_phase, strict=True)]
    waited = columns.number(*WAITED)
    return None if "backward" in columns.phases else waited
