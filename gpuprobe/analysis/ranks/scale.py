"""Throughput, speed-up and efficiency of a program on more ranks, and the parts of the loss.

All times are device time, summed over ranks: the cost of a unit of work on N ranks is N times the
time that passes. Efficiency is the cost on the first recording's ranks divided by the cost on these
(27 minutes on 1 rank, 10 on 4: 27 / 40 = 67.5 %). Each rank's time is its own work,
exposed communication (per step, the time in collectives of the rank that waited least) and waiting
for others (what a rank waited more than that). So the difference of two costs is the sum of the
differences of the three.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import NamedTuple

from gpuprobe.analysis.ranks.stragglers import BACKWARD, full_rows, phase_waits
from gpuprobe.errors import DataError
from gpuprobe.model.plans.step_time import LINKS, RankStepTime
from gpuprobe.model.run.columns import DURATION, MISSING, WAITED, StepColumns
from gpuprobe.model.run.jobs import RUN, ScaleRow, Scaling
from gpuprobe.model.run.recording import RankRecording, Recording
from gpuprobe.model.values import Nanoseconds, Unavailable
from gpuprobe.step_time.recorded import job_time_of, represents_all


class _Cost(NamedTuple):
    """Device time of a recording, in nanoseconds."""

    ranks: int
    steps: int
    total: int
    split: tuple[int, int] | None
    """Communication and waiting; None if unknown."""
    recorded: int
    """The ranks that were recorded: of a prediction, one may represent all."""


def scale(recordings: Sequence[Recording], work: str, network: float = 0.0) -> Scaling:
    """Compare recordings with the first; ``work`` is `STEP` or `RUN` (see `Scaling`).

    On simulated GPUs, times are predicted: between nodes with ``network``, GB/s of each GPU's
    adapter; where one rank was recorded, as of `gpuprobe estimate`, it represents all.

    Raises DataError for a recording without comparable times: without full steps or a prediction,
    in which ranks of the job are missing, without a network that it needs, or simulated next to
    measured ones.
    """
    simulated = [any(rank.session.virtual for rank in one.ranks) for one in recordings]
    if any(simulated) and not all(simulated):
        raise DataError(
            "times on simulated GPUs are predicted, those of the other recordings measured: they "
            "are not comparable",
            hint="record all on simulated GPUs, or all on real ones",
        )
    if any(simulated) and work == RUN:
        raise DataError(
            "the time of a whole run is not predicted on a simulated GPU, only that of a step",
            hint="--work step",
        )
    costs = [
        _predicted(recording, network) if any(simulated) else _cost(recording, first=work == RUN)
        for recording in recordings
    ]
    units = [1 if work == RUN else cost.ranks * cost.steps for cost in costs]
    names = [PurePath(recording.path).name for recording in recordings]
    rows = [
        _row(name, cost, unit, costs[0], units[0])
        for name, cost, unit in zip(names, costs, units, strict=True)
    ]
    return Scaling(work, tuple(rows), predicted=any(simulated))


def _row(name: str, cost: _Cost, units: int, first: _Cost, first_units: int) -> ScaleRow:
    one, base = cost.total / units, first.total / first_units
    throughput = cost.ranks / one * 1e9
    efficiency = base / one
    total = round(one)
    communication = waiting = own = None
    if cost.split is not None:
        communication, waiting = (round(part / units) for part in cost.split)
        own = total - communication - waiting
    lost_communication = lost_waiting = lost_own = None
    if cost.split is not None and first.split is not None:
        lost_communication, lost_waiting = (
            (part / units - before / first_units) / one
            for part, before in zip(cost.split, first.split, strict=True)
        )
        lost_own = 1 - efficiency - lost_communication - lost_waiting
    return ScaleRow(
        name=name,
        ranks=cost.ranks,
        recorded=cost.recorded,
        steps=cost.steps,
        total_ns=total,
        own_ns=own,
        communication_ns=communication,
        waiting_ns=waiting,
        throughput=throughput,
        speedup=efficiency * cost.ranks / first.ranks,
        efficiency=efficiency,
        lost=1 - efficiency,
        lost_own=lost_own,
        lost_communication=lost_communication,
        lost_waiting=lost_waiting,
    )


def _cost(recording: Recording, *, first: bool) -> _Cost:
    """The cost of the full steps that all ranks have. ``first``: including the first step."""
    ranks = {rank.session.rank: rank for rank in recording.ranks}
    name = PurePath(recording.path).name
    _check_complete(name, ranks)
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
    split = None
    if len(known) == len(waits):
        communication = len(known) * sum(min(step) for step in zip(*known, strict=True))
        split = communication, sum(map(sum, known)) - communication
    return _Cost(len(ranks), len(common), total, split, len(ranks))


def _check_complete(name: str, ranks: Mapping[int, RankRecording]) -> None:
    world = max((rank.session.world_size for rank in ranks.values()), default=0)
    if len(ranks) < world:
        raise DataError(
            f"{name} has {len(ranks)} of the {world} ranks of its job",
            hint="collect the files of all ranks in one directory",
        )


def _predicted(recording: Recording, network: float) -> _Cost:
    """The cost of the last whole step on simulated GPUs, as predicted."""
    name = PurePath(recording.path).name
    (first, *others) = recording.ranks
    world = first.session.world_size
    if others or not represents_all(first):
        _check_complete(name, {rank.session.rank: rank for rank in recording.ranks})
    time = job_time_of(recording.ranks, network)
    if isinstance(time, Unavailable):
        raise DataError(
            f"{name}: the time of a step is not predicted: {time.reason}",
            hint="record with --level trace on a GPU whose speeds are known",
        )
    unpriced = [text for text in time.left_out if "(collective)" in text]
    if unpriced:
        raise DataError(
            f"{name}: its communication is not predicted: {unpriced[0]}",
            hint="gpuprobe scale --network GB/S",
        )
    ranks = time.by_rank or (
        RankStepTime(0, time.expected_ns, time.bound_by(LINKS), Nanoseconds(0)),
    )
    # Without collectives, a fast rank is ahead of the others: in an epoch it waits at the end.
    waited = sum(row.waits_ns + time.expected_ns - row.ns for row in ranks)
    communication = sum(row.communication_ns for row in ranks)
    each = world // len(ranks)
    return _Cost(
        world, 1, time.expected_ns * world, (each * communication, each * waited), len(ranks)
    )


def _waited(columns: StepColumns, ranks: int) -> Sequence[int] | None:
    """The time that each step waited for other ranks; None if unknown."""
    if ranks == 1:
        return [0] * columns.rows
    by_phase = phase_waits(columns)
    if by_phase is None:
        return None if BACKWARD in columns.phases else columns.number(*WAITED)
    for path, waited in by_phase.items():
        spent = columns.number("phase", path)
        if any(w == MISSING != t for w, t in zip(waited, spent, strict=True)):
            return None
    return [sum(w for w in row if w != MISSING) for row in zip(*by_phase.values(), strict=True)]
