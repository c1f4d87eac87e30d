"""Estimates of several ranks of one simulated job, in parallel processes."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, Final

from gpuprobe.errors import ProgramFailed
from gpuprobe.model.plans.estimate import SEVERITY, Estimate, RankEstimate
from gpuprobe.model.plans.request import EstimateRequest
from gpuprobe.model.plans.step_time import StepTime
from gpuprobe.model.text import ranges
from gpuprobe.model.values import Unavailable
from gpuprobe.planning.peers import Peers
from gpuprobe.planning.program import ProgramStart
from gpuprobe.planning.trials import failure
from gpuprobe.processes import last_document, last_line
from gpuprobe.reporters.json.plans import ESTIMATE

_PAUSE: Final = 0.05  # seconds between two checks of the processes


def estimate_ranks(
    request: EstimateRequest, start: ProgramStart, notify: Callable[[str], None]
) -> Estimate:
    """The estimate of the rank that needs most, with a row for each requested one: numbers, or one
    rank of each class of ranks that behave alike. Raises ProgramFailed if a rank has no estimate.
    """
    if not isinstance(request.rank, tuple):
        return _distinct(request.ranks, Peers(-1, request, start), notify)
    job = Peers(-1, replace(request, recorded=request.rank), start)
    try:
        found = _estimates(sorted(set(request.rank)), job, notify)
    finally:
        job.close()
    return worst_of(found)


def worst_of(found: dict[int, Estimate]) -> Estimate:
    """The estimate of the rank that needs most, with a row for each rank, and the time of the
    slowest.
    """
    rows = tuple(
        RankEstimate(
            rank, one.verdict, one.peak_allocated, one.peak_reserved, one.total_low, one.total_high
        )
        for rank, one in sorted(found.items())
    )
    worst = max(
        found.values(),
        key=lambda one: (SEVERITY.get(one.verdict, 1), one.total_high, one.peak_allocated),
    )
    time = slowest(one.step_time for one in found.values())
    return replace(worst, by_rank=rows, step_time=time)


def _distinct(ranks: int, job: Peers, notify: Callable[[str], None]) -> Estimate:
    """Estimate rank 0, then one rank of each class that the differences found so far show. As a
    check, estimate the last rank in the class of rank 0 too: a program may do more on rank 0.
    """
    classes = RankClasses(ranks)
    found: dict[int, Estimate] = {}
    try:
        pending = [0]
        while pending:
            found |= _estimates(pending, job, notify)
            for rank in pending:
                classes.report(rank, job.differences(rank))
            pending = [
                next(filter(job.started, group), group[0])
                for group in classes.all()
                if found.keys().isdisjoint(group)
            ]
        first = classes.of(0)
        if first[-1] not in found:
            found |= _estimates([first[-1]], job, notify)
    finally:
        job.close()
    return separated(found, classes)


def separated(found: dict[int, Estimate], classes: RankClasses) -> Estimate:
    """The worst of the estimated ranks, with a row for each and the ranks that it represents."""
    worst = worst_of(found)
    rows: dict[int, RankEstimate] = {}
    unlike = ""
    for row in worst.by_rank:
        alike = classes.of(row.rank)
        before = rows.get(alike[0])
        if before is None:
            rows[alike[0]] = replace(row, alike=ranges(alike, ","))
        elif (before.peak_allocated, before.peak_reserved) != (
            row.peak_allocated,
            row.peak_reserved,
        ):
            rows[alike[0]] = replace(before, alike="")
            rows[row.rank] = row
            unlike = (
                f"ranks {before.rank} and {row.rank} hold equal shards and send alike, but need "
                f"different memory: what ranks {ranges(alike)} need is unknown but for these two"
            )
    text = unlike or (
        "ranks that hold equal shards and are the same stage of a pipeline need the same memory"
    )
    return replace(worst, by_rank=tuple(rows.values()), assumed=(*worst.assumed, text))


def _estimates(
    ranks: Sequence[int], job: Peers, notify: Callable[[str], None]
) -> dict[int, Estimate]:
    """Estimate ranks in parallel, as many as there are cores. A rank that waits for another starts
    it.
    """
    waiting = list(ranks)
    running: list[int] = []
    found: dict[int, Estimate] = {}
    while waiting or running:
        while waiting and len(running) < (os.cpu_count() or 1):
            running.append(waiting.pop(0))
            job.start(running[-1])
        for rank in [rank for rank in running if job.has_ended(rank)]:
            running.remove(rank)
            found[rank] = _estimate(rank, job)
            notify(f"rank {rank}: {found[rank].verdict}")
        time.sleep(_PAUSE)
    return found


def _estimate(rank: int, job: Peers) -> Estimate:
    """The estimate in the output of a rank's process."""
    output = job.output(rank)
    document = last_document(output)
    if document is None:
        last = last_line(output) or "no output"
        raise ProgramFailed(f"rank {rank} ended without an estimate: {last}")
    if "error" in document:
        raise failure(document, f"rank {rank}: ")
    return ESTIMATE.read(document)


def slowest(times: Iterable[StepTime | Unavailable]) -> StepTime | Unavailable:
    """The longest of the times of ranks, which wait for each other; unavailable if one is."""
    known: list[StepTime] = []
    for one in times:
        if isinstance(one, Unavailable):
            return one
        known.append(one)
    return max(known, key=lambda one: one.expected_ns)


class RankClasses:
    """A partition of a job's ranks into classes that behave alike. It starts as one class, and each
    rank's report (`gpuprobe.torch_support.traffic`) may split it.
    """

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._labels: list[tuple[int | None, ...]] = [()] * ranks
        self._groups: dict[tuple[int, ...], None] = {}

    def report(self, rank: int, document: dict[str, Any]) -> None:
        """Split by a rank's report: all ranks by the stages of its pipeline, then the ranks of its
        class by its uneven shards.
        """
        for group in [range(self._ranks), *document["groups"]]:
            self._groups.setdefault(tuple(group))
        for stage in document["stages"]:
            self._split(range(self._ranks), stage, range(len(stage)))
        for group, labels in document["shards"]:
            self._split(self.of(rank), group, labels)

    def of(self, rank: int) -> list[int]:
        """The ranks in the class of ``rank``, with itself."""
        label = self._labels[rank]
        return [other for other in range(self._ranks) if self._labels[other] == label]

    def all(self) -> list[list[int]]:
        """All classes, in the order of their first ranks."""
        found: dict[tuple[int | None, ...], list[int]] = {}
        for rank, label in enumerate(self._labels):
            found.setdefault(label, []).append(rank)
        return list(found.values())

    def _split(self, members: Iterable[int], group: Sequence[int], labels: Sequence[int]) -> None:
        """Split members by their positions in groups of the same size and spacing as ``group``."""
        positions: dict[int, int] = {}
        shape = _shape(group)
        for other in self._groups:
            if _shape(other) == shape:
                for index, rank in enumerate(other):
                    positions.setdefault(rank, index)
        for rank in members:
            position = positions.get(rank)
            self._labels[rank] += (None if position is None else labels[position],)


def _shape(group: Sequence[int]) -> tuple[int, ...]:
    return tuple(rank - group[0] for rank in group)
