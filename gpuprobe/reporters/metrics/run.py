"""The metrics of runs: totals of recordings while they are written.

Labels: ``run`` is the recording's name with a digest of its path, ``rank`` the rank in the job,
``device`` torch's name. Callers bound the number of runs and ranks; the totals bound names from the
program (phases, collectives, kinds of findings).
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import PurePath

from gpuprobe.hazards.rules import IMPLICIT_SYNC, KINDS
from gpuprobe.model.run.session import Step
from gpuprobe.model.run.totals import (
    CollectiveTotals,
    DeviceTotals,
    FindingTotals,
    PhaseTotals,
    RankTotals,
)
from gpuprobe.model.values import Unavailable
from gpuprobe.reporters.metrics.metrics import (
    Family,
    Metric,
    MetricGroup,
    MetricRow,
    Points,
    collected,
    each,
    known,
)

STATES = ("running", "complete", "failed", "incomplete", "unknown")
"""``incomplete``: the process has ended and the recording has no end; ``unknown``: the process is
not on this machine.
"""


_NO_STEP = Unavailable("no step has finished yet")
_NS = 1e-9
_MOST_DEVICES = 32  # of one rank, with tensors that are exported
_MAX_NAME = 64  # characters of a recording's name in a label


@dataclass(frozen=True, slots=True)
class RunReading:
    """One rank of a run at one time. ``run`` is the label, ``state`` one of `STATES`."""

    run: str
    path: str
    state: str
    totals: RankTotals

    @property
    def step(self) -> Step | Unavailable:
        """The newest full step, whose figures are exported."""
        return self.totals.step or _NO_STEP

    @property
    def newest(self) -> Step | Unavailable:
        """The step for the host's and the tensors' figures: the newest full one, else the newest
        record.
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


def _tensors(run: RunReading) -> Points:
    step = run.newest
    for tensors in () if isinstance(step, Unavailable) else step.tensors[:_MOST_DEVICES]:
        for category, size in tensors.by_category.items():
            yield (tensors.device, category.value), size


def _hazards(run: RunReading) -> Points:
    """Counts of hazards that were found: a recording does not contain whether hazards were
    checked."""
    counts: dict[str, int] = {}
    for found in run.totals.findings:
        if found.kind in KINDS and found.kind != IMPLICIT_SYNC.kind:
            counts[found.kind] = counts.get(found.kind, 0) + found.count
    return [((kind,), count) for kind, count in counts.items()]


def _syncs(run: RunReading) -> int | Unavailable:
    counts = [one.count for one in run.totals.findings if one.kind == IMPLICIT_SYNC.kind]
    return sum(counts) if counts else Unavailable("none was found, or hazards were not checked")


def _states(run: RunReading) -> Points:
    return [((state,), int(state == run.state)) for state in STATES]


def _devices(run: RunReading) -> tuple[DeviceTotals, ...]:
    return run.totals.devices


def _devices_labels(one: DeviceTotals) -> tuple[str, ...]:
    return (one.device,)


def _phases(run: RunReading) -> tuple[PhaseTotals, ...]:
    return run.totals.phases


def _phases_labels(one: PhaseTotals) -> tuple[str, ...]:
    return (one.name,)


def _collectives(run: RunReading) -> tuple[CollectiveTotals, ...]:
    return run.totals.collectives


def _collectives_labels(one: CollectiveTotals) -> tuple[str, ...]:
    return (one.op,)


def _findings(run: RunReading) -> tuple[FindingTotals, ...]:
    return run.totals.findings


def _findings_labels(one: FindingTotals) -> tuple[str, ...]:
    return one.kind, one.level.value


_METRICS: MetricGroup[RunReading] = MetricGroup("gpuprobe_run_", ("run", "rank"))

_ROWS: tuple[MetricRow[RunReading], ...] = (
    _METRICS.row(
        "info",
        "1, with what is known of the run in its labels.",
        "recording: session, environment",
        points=_info,
        labels=("recording", "host", "world_size", "level", "torch"),
    ),
    _METRICS.row(
        "state",
        "1 for the state the run is in, 0 for the others.",
        "recording: end; whether its process is alive",
        points=_states,
        labels=("state",),
    ),
    _METRICS.row(
        "start_timestamp_seconds",
        "When the run began, in seconds since the Unix epoch.",
        "recording: session",
        value=lambda run: run.totals.session.started_at,
    ),
    _METRICS.row(
        "last_step_timestamp_seconds",
        "When the newest step ended, in seconds since the Unix epoch.",
        "recording: steps",
        value=_last_step,
    ),
    _METRICS.row(
        "step",
        "Index of the newest step, from 0.",
        "recording: steps",
        value=lambda run: known(run.step, lambda step: step.index),
    ),
    _METRICS.row(
        "steps_total",
        "Training steps that ended.",
        "recording: steps",
        value=lambda run: run.totals.steps,
    ),
    _METRICS.row(
        "step_duration_seconds",
        "Time of the newest step.",
        "recording: steps",
        value=lambda run: known(run.step, lambda step: step.duration_ns),
        per=1_000_000_000,
    ),
    _METRICS.row(
        "step_seconds_total",
        "Time of all steps; its rate over that of gpuprobe_run_steps_total is the mean step time.",
        "recording: steps",
        value=lambda run: run.totals.duration_ns,
        per=1_000_000_000,
    ),
    _METRICS.row(
        "phase_seconds_total",
        "Time of all steps by phase: data, forward, backward, optimizer, setup, other, "
        "and the program's own.",
        "recording: steps",
        points=each(_phases, _phases_labels, lambda one: one.duration_ns),
        labels=("phase",),
        per=1_000_000_000,
    ),
    _METRICS.row(
        "allocated_bytes",
        "Memory of live tensors at the end of the newest step, as torch's allocator counts it.",
        "recording: steps",
        points=each(_devices, _devices_labels, lambda one: one.end.allocated),
        labels=("device",),
    ),
    _METRICS.row(
        "reserved_bytes",
        "Memory that torch's allocator held at the end of the newest step.",
        "recording: steps",
        points=each(_devices, _devices_labels, lambda one: one.end.reserved),
        labels=("device",),
    ),
    _METRICS.row(
        "step_peak_allocated_bytes",
        "Highest allocated memory in the newest step; a lower bound if the step did not "
        "raise the run's peak.",
        "recording: steps",
        points=each(_devices, _devices_labels, lambda one: one.step_peak_allocated),
        labels=("device",),
    ),
    _METRICS.row(
        "step_peak_reserved_bytes",
        "Highest reserved memory in the newest step; a lower bound if the step did not "
        "raise the run's peak.",
        "recording: steps",
        points=each(_devices, _devices_labels, lambda one: one.step_peak_reserved),
        labels=("device",),
    ),
    _METRICS.row(
        "peak_allocated_bytes",
        "Highest allocated memory in any step so far.",
        "recording: steps",
        points=each(_devices, _devices_labels, lambda one: one.peak_allocated),
        labels=("device",),
    ),
    _METRICS.row(
        "peak_reserved_bytes",
        "Highest reserved memory in any step so far.",
        "recording: steps",
        points=each(_devices, _devices_labels, lambda one: one.peak_reserved),
        labels=("device",),
    ),
    _METRICS.row(
        "tensor_bytes",
        "Memory of the tensors that could be named, at the end of the newest step, by "
        "what they are for.",
        "recording: tensors",
        points=_tensors,
        labels=("device", "category"),
    ),
    _METRICS.row(
        "allocator_retries_total",
        "Times the allocator flushed its cache because the driver had no memory left.",
        "recording: steps",
        points=each(
            _devices,
            _devices_labels,
            lambda one: known(one.activity, lambda counts: counts.alloc_retries),
        ),
        labels=("device",),
    ),
    _METRICS.row(
        "allocator_ooms_total",
        "Out-of-memory errors of the allocator.",
        "recording: steps",
        points=each(
            _devices, _devices_labels, lambda one: known(one.activity, lambda counts: counts.ooms)
        ),
        labels=("device",),
    ),
    _METRICS.row(
        "device_allocations_total",
        "Calls of cudaMalloc (or that mapped pages) by the allocator.",
        "recording: steps",
        points=each(
            _devices,
            _devices_labels,
            lambda one: known(one.activity, lambda counts: counts.device_allocs),
        ),
        labels=("device",),
    ),
    _METRICS.row(
        "device_frees_total",
        "Calls of cudaFree (or that unmapped pages) by the allocator.",
        "recording: steps",
        points=each(
            _devices,
            _devices_labels,
            lambda one: known(one.activity, lambda counts: counts.device_frees),
        ),
        labels=("device",),
    ),
    _METRICS.row(
        "resident_bytes",
        "Resident memory of the process at the end of the newest step.",
        "recording: steps",
        value=lambda run: known(run.newest, lambda step: step.host.rss_end),
    ),
    _METRICS.row(
        "peak_resident_bytes",
        "Highest resident memory of the process in any step so far, at least.",
        "recording: steps",
        value=lambda run: run.totals.rss_peak,
    ),
    _METRICS.row(
        "collective_calls_total",
        "Calls of torch.distributed.",
        "recording: collectives",
        points=each(_collectives, _collectives_labels, lambda one: one.count),
        labels=("op",),
    ),
    _METRICS.row(
        "collective_bytes_total",
        "Data that this rank handed to torch.distributed.",
        "recording: collectives",
        points=each(_collectives, _collectives_labels, lambda one: one.bytes),
        labels=("op",),
    ),
    _METRICS.row(
        "collective_seconds_total",
        "Time for which calls of torch.distributed blocked the calling thread.",
        "recording: collectives",
        points=each(_collectives, _collectives_labels, lambda one: one.host_ns),
        labels=("op",),
        per=1_000_000_000,
    ),
    _METRICS.row(
        "hazards_total",
        "Stream races, by kind; only of runs in which some were found.",
        "recording: findings",
        points=_hazards,
        labels=("kind",),
    ),
    _METRICS.row(
        "syncs_total",
        "Times a line of the program made the host wait for the GPU; only of runs in "
        "which this was found.",
        "recording: findings",
        value=_syncs,
    ),
    _METRICS.row(
        "findings",
        "Findings in the recording, by kind and level.",
        "recording: findings",
        points=each(_findings, _findings_labels, lambda one: one.findings),
        labels=("kind", "level"),
    ),
)

RUN_METRICS: tuple[Metric, ...] = tuple(row.metric for row in _ROWS)
"""All metrics of runs."""


def run_name(path: str) -> str:
    """The label of the run recorded in ``path`` (absolute): ``train-3f2a91c0``.

    It is the same for all its ranks, and for a run that replaces it: its counters then restart from
    0, which Prometheus handles like the restart of a process.
    """
    name = PurePath(path).name.removesuffix(".gpuprobe")
    digest = hashlib.sha256(path.encode("utf-8", "surrogatepass")).hexdigest()[:8]
    return f"{name[:_MAX_NAME]}-{digest}"


def run_families(readings: list[RunReading]) -> list[Family]:
    """The metrics of all runs, one family each, without empty families."""
    found = [((one.run, str(one.totals.session.rank)), one) for one in readings]
    return [one for one in collected(_ROWS, found) if one.samples]
