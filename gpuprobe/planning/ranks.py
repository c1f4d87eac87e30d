"""Estimates of several ranks of one pretended job, a process for each, side by side."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final

from gpuprobe.errors import ProgramFailed, UsageError
from gpuprobe.model.plans.estimate import FITS, NOT, Estimate, RankEstimate
from gpuprobe.planning.peers import Peers
from gpuprobe.reporters.json.estimate import estimate_of

_PAUSE: Final = 0.05  # seconds between two looks at the processes
_SEVERITY: Final = {FITS: 0, NOT: 2}  # 1: anything between


def of_ranks(
    wanted: Sequence[int],
    ranks: int,
    peers: Callable[..., Peers],
    order: dict[str, Any],
    notify: Callable[[str], None],
) -> Estimate:
    """The estimate of the rank that needs most, with a row for each of ``wanted``.

    Raises UsageError for a rank that the job does not have, ProgramFailed where one has no
    estimate.
    """
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
        key=lambda one: (_SEVERITY.get(one.verdict, 1), one.total_high, one.peak_allocated),
    )
    return replace(worst, by_rank=rows)


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
