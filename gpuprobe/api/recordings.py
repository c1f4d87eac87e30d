"""Recordings and torch memory snapshots: loaded, reported on, compared, replayed."""

from __future__ import annotations

import os
import shlex
from typing import TYPE_CHECKING, Any

from gpuprobe.errors import DataError
from gpuprobe.model.values import Displayed

if TYPE_CHECKING:
    from gpuprobe.allocator.results import ReplayResult
    from gpuprobe.analysis.compare.diff import Diff
    from gpuprobe.model.report import Report
    from gpuprobe.model.run.jobs import Scaling
    from gpuprobe.model.run.recording import Recording
    from gpuprobe.model.trace import AllocatorSettings, MemoryTrace

__all__ = [
    "ReportDocument",
    "diff",
    "load",
    "metrics",
    "replay",
    "report",
    "scale",
]


def load(path: str | os.PathLike[str]) -> Recording:
    """Read a recording (a directory) or a torch memory snapshot (a ``.pickle`` file).

    A snapshot is parsed, never executed. A recording that is still being written is read as far
    as it is on disk.

    Raises UsageError if the path does not exist, NotARecording if it is something else,
    UnsupportedSchema if a newer major version wrote it, SnapshotError and DataError if it is
    damaged or cannot be read.
    """
    from gpuprobe.recording.load import load

    return load(path)


def load_to_report(path: str | os.PathLike[str]) -> Recording:
    """`load` for a report: while a separate process parses a snapshot, the modules of the report
    are imported here.
    """
    from importlib import import_module

    from gpuprobe.recording.snapshot.child import pending_read

    with pending_read(path) as child:
        import_module("gpuprobe.recording.summary")
        from gpuprobe.recording.load import load

        return load(path, child)


def scale(
    *recordings: Recording | str | os.PathLike[str], work: str = "step", network: float = 0.0
) -> Scaling:
    """Compare a program's speed on different numbers of ranks with the first recording:
    throughput, speed-up, efficiency, and how much is lost to communication, to waiting for other
    ranks, and to own work that takes longer.

    ``work``: what is the same in all. ``"step"``: a step of a rank (batches of one size);
    ``"run"``: a whole run (the same data, divided among the ranks). ``network``: of simulated GPUs,
    GB/s of each GPU's network adapter, for jobs of several nodes.

    Raises what `load` raises, UsageError for fewer than two recordings or another ``work``, and
    DataError for recordings whose times are unknown, or without all ranks of their job.
    """
    from gpuprobe.analysis.ranks.scale import scale
    from gpuprobe.errors import UsageError

    if len(recordings) < 2:
        raise UsageError("scaling needs two recordings or more", hint="the first is the baseline")
    if work not in ("step", "run"):
        raise UsageError(f"work is 'step' or 'run', not {work!r}")
    return scale([_loaded(recording) for recording in recordings], work, network)


class ReportDocument(dict[str, Any], Displayed):
    """A report as its JSON document, which notebooks show as a page. ``summary``: the report as
    typed values; ``recording``: its source.
    """

    def __init__(self, document: dict[str, Any], summary: Report, recording: Recording) -> None:
        super().__init__(document)
        self.summary = summary
        self.recording = recording

    def __repr__(self) -> str:
        return repr(self.summary)


def report(recording: Recording | str | os.PathLike[str], *, top: int = 10) -> ReportDocument:
    """Report where the memory of a recording or torch snapshot went, as a JSON-ready document
    (schema
    ``gpuprobe.report``, version 2, shipped as
    ``gpuprobe/reporters/json/schemas/report-2.json``). ``recording`` may be a path.

    Sizes are integers in bytes, durations integers in nanoseconds; an unknown value is
    ``{"unavailable": reason, "status": …}``. ``top`` limits the tables of lines and modules;
    the rest is in their remainder.

    Raises what `load` raises.
    """
    from gpuprobe.model.io.files import gc_paused
    from gpuprobe.recording.summary import summarize
    from gpuprobe.reporters.json.report import to_document

    found = _loaded(recording)
    with gc_paused():
        typed = summarize(found, top=top)
        return ReportDocument(to_document(typed), typed, found)


def metrics(recording: Recording | str | os.PathLike[str]) -> dict[str, float]:
    """The figures of a recording as flat numbers, for a tracker of experiments. Memory is in bytes,
    at the peak of the rank and device where it is highest; time in seconds a step.

    ``gpuprobe/peak_allocated_bytes``, ``gpuprobe/peak_reserved_bytes``: by torch's allocator; known
    between two bounds, the names end with ``_at_least`` and ``_at_most``.
    ``gpuprobe/not_needed_bytes``: at the peak, but never used again (level ``trace``);
    ``gpuprobe/cause_bytes``: of the largest cause of that, 0 without one.
    ``gpuprobe/predicted_step_seconds``, and with ``_low`` and ``_high``: on a simulated GPU.
    ``gpuprobe/steps``: of all ranks.

    What is unknown is left out. The cause in words is in ``gpuprobe.report(recording)["head"]``.

    Raises what `gpuprobe.load` raises.
    """
    from gpuprobe.model.needs import Need
    from gpuprobe.model.values import Peak, Unavailable

    summary = report(recording).summary
    values: dict[str, float] = {}
    for name in ("allocated", "reserved"):
        peak = getattr(summary.peak, name)
        if isinstance(peak, Peak):
            bounds = {"": peak.at_least}
            if not peak.exact:
                bounds = {"_at_least": peak.at_least, "_at_most": peak.at_most}
            values |= {f"peak_{name}_bytes{which}": size for which, size in bounds.items()}
    if not isinstance(summary.needs, Unavailable):
        needless = (need for need in Need if need.needless)
        values["not_needed_bytes"] = summary.needs.bytes_of(*needless)
    if not isinstance(summary.causes, Unavailable):
        values["cause_bytes"] = summary.causes[0].bytes if summary.causes else 0
    if not isinstance(summary.step_time, Unavailable):
        predicted = summary.step_time
        for which, ns in (
            ("", predicted.expected_ns),
            ("_low", predicted.low_ns),
            ("_high", predicted.high_ns),
        ):
            values[f"predicted_step_seconds{which}"] = ns / 1e9
    values["steps"] = sum(row.steps for row in summary.ranks)
    return {f"gpuprobe/{name}": value for name, value in values.items()}


def diff(
    before: Recording | str | os.PathLike[str], after: Recording | str | os.PathLike[str]
) -> Diff:
    """Compare the peaks of two recordings or torch snapshots, given as recordings or as paths.

    For each rank and device, ``peaks[i].rows["category"]`` (``"module"``, ``"line"``) sum
    exactly to the change of the peak, in bytes. If a peak's step has no trace, the rows compare
    the highest traced steps, named by ``peaks[i].compared``; without any trace they are
    `Unavailable`. Raises what `load` raises.
    """
    from gpuprobe.analysis.compare.diff import diff_recordings

    return diff_recordings(_loaded(before), _loaded(after))


def _loaded(recording: Recording | str | os.PathLike[str]) -> Recording:
    return load(recording) if isinstance(recording, (str, os.PathLike)) else recording


def replay(
    snapshot: str | os.PathLike[str] | Recording | MemoryTrace,
    settings: AllocatorSettings | str | None = None,
    *,
    device: int | None = None,
    capacity: int | None = None,
    search: bool = False,
) -> ReplayResult:
    """Replay a snapshot's (or recording's) allocations through the allocator's rules.

    Always checks the recorded run first: ``result.exact`` and ``result.first_divergence``.
    ``settings`` (an `AllocatorSettings`, or text as in ``PYTORCH_CUDA_ALLOC_CONF`` that changes
    the recorded ones) are simulated as a what-if; ``search`` tries common settings and recommends
    one. ``device`` selects one CUDA device. ``capacity``: bytes available to the allocator
    (default: the limit shown by an out-of-memory event in the trace, otherwise unlimited).

    In a recording every traced step is replayed; a what-if runs on each device's trace with the
    highest peak. Raises UsageError, NotARecording and DataError as
    `gpuprobe.load` does, DataError if there is no CUDA trace, ConfigError for invalid settings.
    """
    # 15 ms: the simulator, which commands that only print a recording do not need.
    from gpuprobe.allocator.results import ReplayResult, replay_all
    from gpuprobe.allocator.settings import parse_conf
    from gpuprobe.model.trace import MemoryTrace

    if isinstance(settings, str):
        parse_conf(settings)  # invalid settings fail before anything is read
    path = known = ""
    if isinstance(snapshot, MemoryTrace):
        found = [snapshot]
    else:
        recording = _loaded(snapshot)
        path = recording.path
        found = [trace for rank in recording.ranks for trace in rank.traces]
        torch = recording.ranks[0].environment.torch if recording.ranks else ""
        known = torch if isinstance(torch, str) else ""
    traces = [
        trace
        for trace in found
        if trace.device.startswith("cuda") and (device is None or trace.device == f"cuda:{device}")
    ]
    if not traces:
        name = path or "it"
        report = f"gpuprobe report {shlex.quote(path)} shows what it contains; " if path else ""
        raise DataError(
            f"{name} contains no allocation trace of a CUDA device, which replay needs"
            if device is None
            else f"{name} contains no allocation trace of cuda:{device}",
            hint=f"{report}a trace is recorded by gpuprobe run --level trace (--gpu GPU without a "
            "GPU) or torch.cuda.memory._record_memory_history()",
        )
    empty = [trace for trace in traces if not len(trace.events)]
    if len(empty) == len(traces):
        raise DataError(
            "there are no events to replay",
            hint="the snapshot was taken without torch.cuda.memory._record_memory_history()",
        )
    with_events = [trace for trace in traces if len(trace.events)]
    results = replay_all(with_events, settings, capacity=capacity, search=search, torch=known)
    names = (t.device + ("" if t.step is None else f", step {t.step}") for t in empty)
    return ReplayResult(path=path, traces=results, empty=tuple(names))
