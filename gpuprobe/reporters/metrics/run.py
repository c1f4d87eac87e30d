"""The metrics of runs: what recordings come to, for as long as they are written.

Labels: ``run`` is the recording's name with a digest that keeps runs of the same name apart,
``rank`` the rank in the job, ``device`` torch's name. How many runs and ranks there are is bounded
by who calls this; names that come from the program (phases, collectives, kinds of findings) are
bounded by the totals themselves.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import PurePath

from gpuprobe.model.run.session import Step
from gpuprobe.model.run.totals import RankTotals
from gpuprobe.model.values import Unavailable
from gpuprobe.reporters.metrics.metrics import Family, Metric, Points
from gpuprobe.reporters.metrics.table import MetricRow, collected, read_table

STATES = ("running", "complete", "failed", "killed", "unknown")
"""``killed``: the process is gone and wrote no end; ``unknown``: it runs, if at all, elsewhere."""

HAZARDS = (
    "read-after-write",
    "write-after-read",
    "write-after-write",
    "use-after-free",
    "host-race",
)
_SYNC = "implicit-sync"

_NO_STEP = Unavailable("no step has finished yet")
_NS = 1e-9
_MOST_DEVICES = 32  # of one rank whose tensors are exported
_MAX_NAME = 64  # characters of a recording's name in a label


@dataclass(frozen=True, slots=True)
class RunReading:
    """One rank of one run at one time: ``run`` is its label, ``state`` one of `STATES`."""

    run: str
    path: str
    state: str
    totals: RankTotals

    @property
    def step(self) -> Step | Unavailable:
        """The newest full step."""
        return self.totals.step or _NO_STEP

    @property
    def newest(self) -> Step | Unavailable:
        """The step that the state is of: what follows the last full one does not, as for
        devices and for the index.
        """
        return self.totals.step or self.totals.newest or _NO_STEP


def _info(run: RunReading) -> Points:
    session, environment = run.totals.session, run.totals.environment
    torch = environment.torch
    labels = (
        PurePath(run.path).name,
        environment.hostname,
        str(session.world_size),
        session.level,
        "" if isinstance(torch, Unavailable) else torch,
    )
    return ((labels, 1),)


def _last_step(run: RunReading) -> float | Unavailable:
    step = run.totals.step
    if step is None:
        return _NO_STEP
    try:
        return run.totals.session.started_at + (step.start_ns + step.duration_ns) * _NS
    except OverflowError:
        return Unavailable("the recording is damaged: invalid time")


def _tensors(run: RunReading) -> Iterator[tuple[tuple[str, ...], int]]:
    step = run.newest
    for tensors in () if isinstance(step, Unavailable) else step.tensors[:_MOST_DEVICES]:
        for category, size in tensors.by_category.items():
            yield (tensors.device, category.value), size


def _hazards(run: RunReading) -> Points:
    """Only what was found: whether a run was searched for hazards is not in its recording."""
    counts: dict[str, int] = {}
    for found in run.totals.findings:
        if found.kind in HAZARDS:
            counts[found.kind] = counts.get(found.kind, 0) + found.count
    return [((kind,), count) for kind, count in counts.items()]


def _syncs(run: RunReading) -> int | Unavailable:
    found = [one.count for one in run.totals.findings if one.kind == _SYNC]
    return sum(found) if found else Unavailable("none was found, or hazards were not checked")


_ROWS: tuple[MetricRow[RunReading], ...] = read_table(
    "run_metrics.txt",
    "gpuprobe_run_",
    ("run", "rank"),
    {
        "run": "gpuprobe.run.name",
        "rank": "gpuprobe.run.rank",
        "device": "gpuprobe.run.device",
        "host": "host.name",
    },
    functions={
        "info()": _info,
        "states()": lambda run: [((state,), int(state == run.state)) for state in STATES],
        "last_step()": _last_step,
        "tensors()": _tensors,
        "hazards()": _hazards,
        "syncs()": _syncs,
    },
    lists={
        "totals.devices": lambda one: (one.device,),
        "totals.phases": lambda one: (one.name,),
        "totals.collectives": lambda one: (one.op,),
        "totals.findings": lambda one: (one.kind, one.level.value),
    },
)

RUN_METRICS: tuple[Metric, ...] = tuple(row.metric for row in _ROWS)
"""All metrics of runs."""


def run_name(path: str) -> str:
    """The label of the run recorded in ``path`` (absolute): ``train-3f2a91c0``.

    The same for all its ranks, and for a run that replaces it: its counters begin anew then, which
    Prometheus expects of a process that was restarted.
    """
    name = PurePath(path).name.removesuffix(".gpuprobe")
    digest = hashlib.sha256(path.encode("utf-8", "surrogatepass")).hexdigest()[:8]
    return f"{name[:_MAX_NAME]}-{digest}"


def run_families(readings: list[RunReading]) -> list[Family]:
    """The metrics of all runs, one family each; those without a sample are left out."""
    found = [((one.run, str(one.totals.session.rank)), one) for one in readings]
    return [one for one in collected(_ROWS, found) if one.samples]
