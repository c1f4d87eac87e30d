"""The metrics of runs: what recordings come to, for as long as they are written.

Labels: ``run`` is the recording's name with a digest that tells runs of the same name apart,
``rank`` the rank in the job, ``device`` torch's name. How many runs and ranks there are is bounded
by who calls this; names that come from the program (phases, collectives, kinds of findings) are
bounded by the totals themselves.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from gpuprobe.model.run.session import AllocatorActivity, Step
from gpuprobe.model.run.totals import DeviceTotals, RankTotals
from gpuprobe.model.values import Peak, Unavailable
from gpuprobe.reporters.metrics.metrics import Family, Kind, Metric, Otel, Points, family, otel_name

__all__ = ["RUN_METRICS", "STATES", "RunReading", "run_families", "run_name"]

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

_RANK = ("run", "rank")
_DEVICE = ("run", "rank", "device")
_ATTRIBUTES = {
    "run": "gpuprobe.run.name",
    "rank": "gpuprobe.run.rank",
    "device": "gpuprobe.run.device",
    "host": "host.name",
}
_NS = 1e-9
_MOST_DEVICES = 32  # of one rank whose tensors are told
_MAX_NAME = 64  # characters of a recording's name in a label


@dataclass(frozen=True, slots=True)
class RunReading:
    """One rank of one run at one moment: ``run`` is its label, ``state`` one of `STATES`."""

    run: str
    path: str
    state: str
    totals: RankTotals


@dataclass(frozen=True, slots=True)
class _Row:
    metric: Metric
    read: Callable[[RunReading], Points]
    factor: float = 1


def _row(
    name: str,
    unit: str,
    text: str,
    read: Callable[[RunReading], Any],
    *,
    labels: tuple[str, ...] = (),
    kind: Kind = "gauge",
    factor: float = 1,
    otel: str = "",
    source: str = "recording: steps",
) -> _Row:
    metric = Metric(
        name,
        kind,
        unit,
        text,
        _RANK + labels,
        source,
        Otel(otel or otel_name(name, unit), kind, _ATTRIBUTES),
    )
    if labels:
        return _Row(metric, read, factor)
    return _Row(metric, lambda run: (((), read(run)),), factor)


_NO_STEP = Unavailable("no step has ended yet")


def _of_step(read: Callable[[Step], Any]) -> Callable[[RunReading], Any]:
    def value(run: RunReading) -> Any:
        step = run.totals.step
        return _NO_STEP if step is None else read(step)

    return value


def _state(run: RunReading) -> Step | None:
    """The step that tells of the state: what follows the last full one does not, as for `_devices`
    and for the index."""
    return run.totals.step or run.totals.newest


def _of_state(read: Callable[[Step], Any]) -> Callable[[RunReading], Any]:
    def value(run: RunReading) -> Any:
        step = _state(run)
        return _NO_STEP if step is None else read(step)

    return value


def _devices(read: Callable[[DeviceTotals], Any]) -> Callable[[RunReading], Points]:
    return lambda run: [((device.device,), read(device)) for device in run.totals.devices]


def _activity(read: Callable[[AllocatorActivity], int]) -> Callable[[RunReading], Points]:
    def value(device: DeviceTotals) -> Any:
        activity = device.activity
        return activity if isinstance(activity, Unavailable) else read(activity)

    return _devices(value)


def _least(peak: Peak | Unavailable) -> int | Unavailable:
    return peak if isinstance(peak, Unavailable) else peak.at_least


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
        return Unavailable("the recording is damaged: a time that is none")


def _tensors(run: RunReading) -> Iterator[tuple[tuple[str, ...], int]]:
    step = _state(run)
    for tensors in step.tensors[:_MOST_DEVICES] if step is not None else ():
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
    return sum(found) if found else Unavailable("none was found, or none was looked for")


_ROWS: tuple[_Row, ...] = (
    _row(
        "gpuprobe_run_info",
        "",
        "1, with what is known of the run in its labels.",
        _info,
        labels=("recording", "host", "world_size", "level", "torch"),
        source="recording: session, environment",
    ),
    _row(
        "gpuprobe_run_state",
        "",
        "1 for the state the run is in, 0 for the others.",
        lambda run: [((state,), int(state == run.state)) for state in STATES],
        labels=("state",),
        source="recording: end; whether its process is alive",
    ),
    _row(
        "gpuprobe_run_start_timestamp_seconds",
        "seconds",
        "When the run began, in seconds since the Unix epoch.",
        lambda run: run.totals.session.started_at,
        source="recording: session",
    ),
    _row(
        "gpuprobe_run_last_step_timestamp_seconds",
        "seconds",
        "When the newest step ended, in seconds since the Unix epoch.",
        _last_step,
    ),
    _row(
        "gpuprobe_run_step",
        "",
        "Index of the newest step, from 0.",
        _of_step(lambda step: step.index),
        otel="gpuprobe.run.step_index",
    ),
    _row(
        "gpuprobe_run_steps_total",
        "",
        "Training steps that ended.",
        lambda run: run.totals.steps,
        kind="counter",
    ),
    _row(
        "gpuprobe_run_step_duration_seconds",
        "seconds",
        "Time of the newest step.",
        _of_step(lambda step: step.duration_ns),
        factor=_NS,
    ),
    _row(
        "gpuprobe_run_step_seconds_total",
        "seconds",
        "Time of all steps; its rate over that of gpuprobe_run_steps_total is the mean step time.",
        lambda run: run.totals.duration_ns,
        kind="counter",
        factor=_NS,
        otel="gpuprobe.run.step_time",
    ),
    _row(
        "gpuprobe_run_phase_seconds_total",
        "seconds",
        "Time of all steps by phase: data, forward, backward, optimizer, setup, other, and the "
        "program's own.",
        lambda run: [((one.name,), one.duration_ns) for one in run.totals.phases],
        labels=("phase",),
        kind="counter",
        factor=_NS,
        otel="gpuprobe.run.phase_time",
    ),
    _row(
        "gpuprobe_run_allocated_bytes",
        "bytes",
        "Memory of live tensors at the end of the newest step, as torch's allocator counts it.",
        _devices(lambda device: device.end.allocated),
        labels=("device",),
    ),
    _row(
        "gpuprobe_run_reserved_bytes",
        "bytes",
        "Memory that torch's allocator held at the end of the newest step.",
        _devices(lambda device: device.end.reserved),
        labels=("device",),
    ),
    _row(
        "gpuprobe_run_step_peak_allocated_bytes",
        "bytes",
        "Highest allocated memory in the newest step; a lower bound where the step did not raise "
        "the run's peak.",
        _devices(lambda device: _least(device.step_peak_allocated)),
        labels=("device",),
    ),
    _row(
        "gpuprobe_run_step_peak_reserved_bytes",
        "bytes",
        "Highest reserved memory in the newest step; a lower bound where the step did not raise "
        "the run's peak.",
        _devices(lambda device: _least(device.step_peak_reserved)),
        labels=("device",),
    ),
    _row(
        "gpuprobe_run_peak_allocated_bytes",
        "bytes",
        "Highest allocated memory in any step so far.",
        _devices(lambda device: _least(device.peak_allocated)),
        labels=("device",),
    ),
    _row(
        "gpuprobe_run_peak_reserved_bytes",
        "bytes",
        "Highest reserved memory in any step so far.",
        _devices(lambda device: _least(device.peak_reserved)),
        labels=("device",),
    ),
    _row(
        "gpuprobe_run_tensor_bytes",
        "bytes",
        "Memory of the tensors that could be named, at the end of the newest step, by what they "
        "are for.",
        _tensors,
        labels=("device", "category"),
        source="recording: tensors",
    ),
    _row(
        "gpuprobe_run_allocator_retries_total",
        "",
        "Times the allocator flushed its cache because the driver had no memory left.",
        _activity(lambda activity: activity.alloc_retries),
        labels=("device",),
        kind="counter",
    ),
    _row(
        "gpuprobe_run_allocator_ooms_total",
        "",
        "Out-of-memory errors of the allocator.",
        _activity(lambda activity: activity.ooms),
        labels=("device",),
        kind="counter",
    ),
    _row(
        "gpuprobe_run_device_allocations_total",
        "",
        "Calls of cudaMalloc (or that mapped pages) by the allocator.",
        _activity(lambda activity: activity.device_allocs),
        labels=("device",),
        kind="counter",
    ),
    _row(
        "gpuprobe_run_device_frees_total",
        "",
        "Calls of cudaFree (or that unmapped pages) by the allocator.",
        _activity(lambda activity: activity.device_frees),
        labels=("device",),
        kind="counter",
    ),
    _row(
        "gpuprobe_run_resident_bytes",
        "bytes",
        "Resident memory of the process at the end of the newest step.",
        _of_state(lambda step: step.host.rss_end),
    ),
    _row(
        "gpuprobe_run_peak_resident_bytes",
        "bytes",
        "Highest resident memory of the process in any step so far, at least.",
        lambda run: _least(run.totals.rss_peak),
    ),
    _row(
        "gpuprobe_run_collective_calls_total",
        "",
        "Calls of torch.distributed.",
        lambda run: [((one.op,), one.count) for one in run.totals.collectives],
        labels=("op",),
        kind="counter",
        source="recording: collectives",
    ),
    _row(
        "gpuprobe_run_collective_bytes_total",
        "bytes",
        "Data that this rank handed to torch.distributed.",
        lambda run: [((one.op,), one.bytes) for one in run.totals.collectives],
        labels=("op",),
        kind="counter",
        source="recording: collectives",
    ),
    _row(
        "gpuprobe_run_collective_seconds_total",
        "seconds",
        "Time for which calls of torch.distributed held up the thread that made them.",
        lambda run: [((one.op,), one.host_ns) for one in run.totals.collectives],
        labels=("op",),
        kind="counter",
        factor=_NS,
        otel="gpuprobe.run.collective_time",
        source="recording: collectives",
    ),
    _row(
        "gpuprobe_run_hazards_total",
        "",
        "Stream races, by kind; only of runs in which some were found.",
        _hazards,
        labels=("kind",),
        kind="counter",
        source="recording: findings",
    ),
    _row(
        "gpuprobe_run_syncs_total",
        "",
        "Times a line of the program made the host wait for the GPU; only of runs in which this "
        "was found.",
        _syncs,
        kind="counter",
        source="recording: findings",
    ),
    _row(
        "gpuprobe_run_findings",
        "",
        "Findings in the recording, by kind and level.",
        lambda run: [((one.kind, one.level.value), one.findings) for one in run.totals.findings],
        labels=("kind", "level"),
        source="recording: findings",
    ),
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
    families = []
    for row in _ROWS:
        points = (
            ((one.run, str(one.totals.session.rank), *extra), value)
            for one in readings
            for extra, value in row.read(one)
        )
        families.append(family(row.metric, points, factor=row.factor))
    return [one for one in families if one.samples]
