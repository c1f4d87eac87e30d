"""Estimates of several ranks of one simulated job, in parallel processes."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, Final

from gpuprobe.errors import ProgramFailed, UsageError
from gpuprobe.model.plans.estimate import SEVERITY, Estimate, RankEstimate
from gpuprobe.model.text import ranges
from gpuprobe.planning.peers import Peers
from gpuprobe.reporters.json.estimate import estimate_of

_PAUSE: Final = 0.05  # seconds between two looks at the processes
DISTINCT: Final = "distinct"


def of_ranks(
    wanted: Sequence[int] | str,
    ranks: int,
    peers: Callable[..., Peers],
    order: dict[str, Any],
    notify: Callable[[str], None],
) -> Estimate:
    """The estimate of the rank that needs most, with a row for each of ``wanted``: numbers, or
    `DISTINCT` for one rank of each group of ranks that behave alike.

    Raises UsageError for a rank that the job does not have and another word, ProgramFailed where
    a rank has no estimate.
    """
    if isinstance(wanted, str):
        if wanted != DISTINCT:
            raise UsageError(f"unknown ranks {wanted!r}", hint=f"numbers from 0, or {DISTINCT!r}")
        return _distinct(ranks, peers(-1, **order), notify)
    for rank in wanted:
        if not 0 <= rank < ranks:
            raise UsageError(
                f"there is no rank {rank} of {ranks}",
                hint=f"ranks are counted from 0: the last one is {ranks - 1}",
            )
    job = peers(-1, **order)
    try:
        found = _estimates(sorted(set(wanted)), job, notify)
    finally:
        job.close()
    return worst_of(found)


def worst_of(found: dict[int, Estimate]) -> Estimate:
    """The estimate that needs most, with a row for each."""
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
    return replace(worst, by_rank=rows)


def _distinct(ranks: int, job: Peers, notify: Callable[[str], None]) -> Estimate:
    """Rank 0 first, whose differences from others show whom to estimate next, until every class
    has one. Of its class the last rank too, as a check: a program may do more on rank 0.
    """
    classes = Classes(ranks)
    found: dict[int, Estimate] = {}
    try:
        wanted = [0]
        while wanted:
            found |= _estimates(wanted, job, notify)
            for rank in wanted:
                classes.report(rank, job.differences(rank))
            wanted = [
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


def separated(found: dict[int, Estimate], classes: Classes) -> Estimate:
    """The worst of the ranks that were estimated, each with those that are alike."""
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
    wanted: Sequence[int], job: Peers, notify: Callable[[str], None]
) -> dict[int, Estimate]:
    """As many at a time as there are cores; one that waits for another starts it."""
    waiting = list(wanted)
    running: list[int] = []
    found: dict[int, Estimate] = {}
    while waiting or running:
        while waiting and len(running) < (os.cpu_count() or 1):
            running.append(waiting.pop(0))
            job.start(running[-1])
        for rank in [rank for rank in running if job.is_over(rank)]:
            running.remove(rank)
            found[rank] = _estimate(rank, job)
            notify(f"rank {rank}: {found[rank].verdict}")
        time.sleep(_PAUSE)
    return found


def _estimate(rank: int, job: Peers) -> Estimate:
    """What the process of a rank has answered, among all that it printed."""
    output = job.output(rank)
    for line in reversed(output.splitlines()):
        if not line.startswith("{"):
            continue
        try:
            document = json.loads(line)
        except ValueError:
            continue
        if "error" in document:
            text = f"rank {rank}: {document['error']}"
            raise ProgramFailed(text, hint=document.get("hint", ""))
        return estimate_of(document)
    last = next((line for line in reversed(output.splitlines()) if line.strip()), "no output")
    raise ProgramFailed(f"rank {rank} ended without an estimate: {last.strip()}")


class Classes:
    """A partition of the ranks of a job. It begins as one class, and every report of a rank
    (`gpuprobe.torch_support.jobs.differences`) may split it.
    """

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._labels: list[tuple[Any, ...]] = [()] * ranks
        self._groups: dict[tuple[int, ...], None] = {}

    def report(self, rank: int, document: dict[str, Any]) -> None:
        """Split by what ``rank`` has found: by the stages of its pipeline all ranks, by its uneven
        shards those that are in its class then.
        """
        for group in [range(self._ranks), *document["groups"]]:
            self._groups.setdefault(tuple(group))
        for stage in document["stages"]:
            self._split(range(self._ranks), stage, range(len(stage)))
        for group, labels in document["shards"]:
            self._split(self.of(rank), group, labels)

    def of(self, rank: int) -> list[int]:
        """The ranks that are alike with ``rank``, and itself."""
        label = self._labels[rank]
        return [other for other in range(self._ranks) if self._labels[other] == label]

    def all(self) -> list[list[int]]:
        """Every class, by its first rank."""
        found: dict[tuple[Any, ...], list[int]] = {}
        for rank, label in enumerate(self._labels):
            found.setdefault(label, []).append(rank)
        return list(found.values())

    def _split(self, members: Iterable[int], group: Sequence[int], labels: Sequence[int]) -> None:
        """By the place that each has in a group like ``group``: as large, and as wide apart."""
        places: dict[int, int] = {}
        shape = _shape(group)
        for other in self._groups:
            if _shape(other) == shape:
                for index, rank in enumerate(other):
                    places.setdefault(rank, index)
        for rank in members:
            place = places.get(rank)
            self._labels[rank] += (None if place is None else labels[place],)


def _shape(group: Sequence[int]) -> tuple[int, ...]:
    return tuple(rank - group[0] for rank in group)
