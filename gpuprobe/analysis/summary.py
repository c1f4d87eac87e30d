"""The report of a recording as plain data: what every renderer prints.

The document is versioned (`SCHEMA`, `VERSION`) and described by the JSON Schema
``gpuprobe/reporters/json/schemas/report-1.json``. All sizes are integers in bytes, all durations
integers in nanoseconds. A value that is not known is ``{"unavailable": reason, "status": …}``.

In every table ``rows`` and ``remainder`` sum to ``total``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import PurePath
from typing import Any

from gpuprobe._version import __version__
from gpuprobe.analysis.advice import Evidence, advise
from gpuprobe.analysis.growth.growth import Growth, growth_of
from gpuprobe.analysis.peak.forensics import forensics
from gpuprobe.analysis.peak.high_water import HighWater, Share, by_category, by_line, by_module
from gpuprobe.analysis.peak.peaks import (
    PeakSite,
    device_peaks,
    high_water_at,
    host_peak,
    nearest_trace,
    overall_peak,
)
from gpuprobe.analysis.placement import all_findings, placement_of
from gpuprobe.analysis.ranks import compare_ranks, comparison
from gpuprobe.analysis.reserved.non_tensor import beside, pinned_memory
from gpuprobe.analysis.time_shares import time_shares
from gpuprobe.errors import DataError
from gpuprobe.model.codec import to_plain
from gpuprobe.model.memory import AllocatorCounts, Category
from gpuprobe.model.run.recording import RankRecording, Recording
from gpuprobe.model.run.session import BlindSpot, DeviceWindow, KnownTensors, Phase, Step
from gpuprobe.model.values import Peak, ReadStatus, Unavailable

__all__ = ["SCHEMA", "VERSION", "Table", "summarize"]

SCHEMA = "gpuprobe.report"

VERSION = (1, 3)
"""(major, minor). A minor version adds keys; a major one may change them.

History:
* 1.0: first version.
* 1.1: ``peak.nearest_trace``, for a peak in a step without a trace; ``fragmentation.step``.
* 1.2: ``beside_tensors.devices`` are those of all ranks, with their ``rank``; before, of the
  first. ``out_of_memory`` is of all ranks and devices, with the ``rank``; before, of the peak's.
* 1.3: ``session.virtual``; ``rank_comparison.memory.lowest`` and ``.alike``; no ``time`` in it on
  virtual GPUs.
"""

Table = dict[str, Any]

_LINE_KEY = re.compile(r"(?P<file>.+?):(?P<line>\d+)(?: in (?P<function>.+))?", re.DOTALL)
_FEW = 8
"""Ranks that a sentence names."""

_NOT_MEASURED = Unavailable("not measured", ReadStatus.NOT_COLLECTED)


def summarize(
    recording: Recording,
    *,
    top: int = 10,
    is_running: Callable[[RankRecording], bool | None] = lambda rank: None,
) -> dict[str, Any]:
    """Build the report. Tables of lines and modules have at most ``top`` rows.

    ``is_running`` says of a rank whose recording has no end whether its process still runs,
    None where that cannot be told. Reads the traces of the peak's step; a trace that cannot
    be read makes its tables unavailable, not the report. Raises DataError where the recording
    has no rank yet.
    """
    if not recording.ranks:
        raise DataError(f"nothing is recorded in {recording.path} yet")
    sites = device_peaks(recording)
    site = overall_peak(recording, sites)
    mark: HighWater | Unavailable = _NOT_MEASURED if site is None else high_water_at(site)
    nearest = None
    if site is not None and isinstance(mark, Unavailable) and mark.status is not ReadStatus.ERROR:
        nearest = nearest_trace(site)
    shown = mark if nearest is None else nearest[1]
    growth = None if site is None else growth_of(site)
    found = forensics(site, sites)
    evidence = None
    if site is not None:
        moment = (
            "the peak" if nearest is None else f"the high water mark of step {nearest[0].index}"
        )
        evidence = Evidence(site, shown, growth, _most_kept(found["leaks"]), moment)
    first = recording.ranks[0]
    statuses = [_status(rank, is_running, recording.kind) for rank in recording.ranks]
    pinned = pinned_memory(first.steps)
    return {
        "schema": SCHEMA,
        "version": list(VERSION),
        "gpuprobe": __version__,
        "recording": {
            "name": PurePath(recording.path).name,
            "path": recording.path,
            "kind": recording.kind,
            "format_version": list(recording.schema_version),
            "status": min(statuses, key=_STATUSES.index),
            "error": next((e for r in recording.ranks if (e := _error(r)) is not None), None),
        },
        "environment": _with_defaults(first.environment),
        "session": _with_defaults(first.session),
        "ranks": [
            _rank(rank, status) for rank, status in zip(recording.ranks, statuses, strict=True)
        ],
        "devices": [_device(s) for s in sites],
        "peak": {**_peak(site, sites, mark), "nearest_trace": _nearest(site, nearest)},
        "categories": _categories(site, mark, nearest),
        "top_lines": _lines(shown, top),
        "top_modules": _modules(shown, top),
        "growth": None if growth is None else _growth(growth, top),
        **found,
        "time": _time(first),
        "beside_tensors": {
            "devices": [
                {"rank": rank.session.rank, **_with_defaults(item)}
                for rank in recording.ranks
                for item in beside(rank.steps)
            ],
            "pinned": None if pinned is None else _with_defaults(pinned),
        },
        "placement": [_with_defaults(item) for item in placement_of(first.steps)],
        "rank_comparison": comparison(compare_ranks(recording, sites), top),
        "steps": {
            "highlights": _highlights(site),
            "rows": [_step(rank, step) for rank in recording.ranks for step in rank.steps],
        },
        "findings": [
            {"rank": rank.session.rank, **_with_defaults(finding)}
            for rank in recording.ranks
            for finding in all_findings(rank)
        ],
        "blind_spots": _blind_spots(recording, site, mark, statuses),
        "advice": [] if evidence is None else [_with_defaults(a) for a in advise(evidence)],
    }


# -- the recording


_STATUSES = ("failed", "killed", "unfinished", "running", "complete")  # the worst first


def _status(
    rank: RankRecording, is_running: Callable[[RankRecording], bool | None], kind: str
) -> str:
    if kind == "snapshot":
        return "complete"
    if rank.end is not None:
        return "complete" if rank.end.error is None else "failed"
    running = is_running(rank)
    if running is None:
        return "unfinished"
    return "running" if running else "killed"


def _error(rank: RankRecording) -> dict[str, Any] | None:
    if rank.end is None or rank.end.error is None:
        return None
    error = rank.end.error
    return {
        "rank": rank.session.rank,
        "type": error.type,
        "message": error.message,
        "out_of_memory": error.out_of_memory,
    }


def _with_defaults(value: Any) -> dict[str, Any]:
    """Every field, the ones at their default too: readers of JSON do not know our defaults."""
    return {name: to_plain(getattr(value, name)) for name in value.__dataclass_fields__}


def _rank(rank: RankRecording, status: str) -> dict[str, Any]:
    ended = rank.end
    host = host_peak(rank)
    return {
        "rank": rank.session.rank,
        "local_rank": rank.session.local_rank,
        "pid": rank.session.pid,
        "hostname": rank.environment.hostname,
        "status": status,
        "error": _error(rank),
        "steps": sum(step.ended_by != "end" for step in rank.steps),
        "duration_ns": to_plain(
            ended.duration_ns if ended else Unavailable("the session has no end yet")
        ),
        "host_rss_peak": _bounds(_NOT_MEASURED if host is None else host.amount),
    }


# -- peaks


def _bounds(peak: Peak | Unavailable) -> Any:
    if isinstance(peak, Unavailable):
        return to_plain(peak)
    return {"at_least": peak.at_least, "at_most": peak.at_most, "exact": peak.exact}


def _where(site: PeakSite) -> dict[str, Any]:
    return {
        "rank": site.rank.session.rank,
        "device": site.device or None,
        "step": None if site.step is None else site.step.index,
        "phase": site.phase or None,
        "certain": site.certain,
    }


def _peak(
    site: PeakSite | None, sites: list[PeakSite], mark: HighWater | Unavailable
) -> dict[str, Any]:
    """The headline. ``measure`` says what was measured: allocated memory of a device, or
    where that is not known the resident memory of the process.
    """
    if site is None:
        nothing = _bounds(_NOT_MEASURED)
        return {
            "measure": None,
            **dict.fromkeys(("rank", "device", "step", "phase")),
            "certain": False,
            **dict.fromkeys(("allocated", "reserved", "host_rss"), nothing),
            **dict.fromkeys(("traced", "before_trace"), to_plain(_NOT_MEASURED)),
        }
    host = host_peak(site.rank)
    on_device = bool(site.device)
    allocated: Peak | Unavailable = site.amount
    if not on_device:  # then no device's amount is known: say why
        allocated = next((s.amount for s in sites if s.rank is site.rank), _NOT_MEASURED)
    return {
        "measure": "allocated" if on_device else "host_rss",
        **_where(site),
        "allocated": _bounds(allocated),
        "reserved": _bounds(site.reserved if on_device else _NOT_MEASURED),
        "host_rss": _bounds(_NOT_MEASURED if host is None else host.amount),
        "traced": to_plain(mark if isinstance(mark, Unavailable) else mark.allocated),
        "before_trace": to_plain(mark if isinstance(mark, Unavailable) else mark.baseline_bytes),
    }


def _nearest(
    site: PeakSite | None, nearest: tuple[Step, HighWater] | None
) -> dict[str, Any] | None:
    """The step that the tables are of, where the peak's own has no trace; else null."""
    if site is None or nearest is None or isinstance(site.amount, Unavailable):
        return None
    step, mark = nearest
    return {"step": step.index, "below_peak": max(0, site.amount.at_least - mark.allocated)}


def _device(site: PeakSite) -> dict[str, Any]:
    return {
        **_where(site),
        "peak_allocated": _bounds(site.amount),
        "peak_reserved": _bounds(site.reserved),
        "end": _counts(site.end),
    }


def _counts(counts: AllocatorCounts) -> dict[str, Any]:
    """allocated + pending + cached = reserved, where all are known."""
    names = ("allocated", "pending", "cached", "reserved", "requested")
    return {name: to_plain(getattr(counts, name)) for name in names}


# -- tables


def _table(
    shares: Sequence[Share], top: int, row: Callable[[Share], dict[str, Any]], what: str
) -> Table:
    """The first ``top`` of ``shares``, and the rest as one remainder."""
    shown, rest = shares[:top], shares[top:]
    return {
        "total": sum(share.bytes for share in shares),
        "rows": [row(share) for share in shown],
        "remainder": {
            "what": f"{len(rest)} more {what[:-1] if len(rest) == 1 else what}",
            "bytes": sum(share.bytes for share in rest),
            "blocks": sum(share.blocks for share in rest),
        },
    }


def _plain_row(share: Share) -> dict[str, Any]:
    return {"key": share.key, "bytes": share.bytes, "blocks": share.blocks}


def _line_row(share: Share) -> dict[str, Any]:
    found = None if share.key.startswith("(") else _LINE_KEY.fullmatch(share.key)
    return {
        **_plain_row(share),
        "file": found["file"] if found else None,
        "line": int(found["line"]) if found else None,
        "function": found["function"] if found else None,
    }


def _lines(mark: HighWater | Unavailable, top: int) -> Table:
    if isinstance(mark, Unavailable):
        return {"unavailable": mark.reason, "status": mark.status.value}
    return _table(by_line(mark), top, _line_row, "lines")


def _modules(mark: HighWater | Unavailable, top: int) -> Table:
    if isinstance(mark, Unavailable):
        return {"unavailable": mark.reason, "status": mark.status.value}
    return _table(by_module(mark), top, _plain_row, "modules")


def _categories(
    site: PeakSite | None,
    mark: HighWater | Unavailable,
    nearest: tuple[Step, HighWater] | None = None,
) -> Table:
    """At the peak where a trace tells, else in the highest step that has a trace, else the known
    tensors at the end of the peak's step.

    ``total`` and ``remainder`` are unavailable where allocated memory is not known.
    """
    if not isinstance(mark, Unavailable):
        table = _table(by_category(mark), len(Category), _plain_row, "categories")
        return {"at": "peak", "step": None if site is None else _index(site), **table}
    if nearest is not None:
        table = _table(by_category(nearest[1]), len(Category), _plain_row, "categories")
        return {"at": "nearest_trace", "step": nearest[0].index, **table}
    if site is None or site.step is None or not site.step.tensors:
        return {"unavailable": mark.reason, "status": mark.status.value}
    tensors = next((t for t in site.step.tensors if t.device == site.device), site.step.tensors[0])
    return {"at": "step_end", "step": site.step.index, **_known(tensors)}


def _index(site: PeakSite) -> int | None:
    return None if site.step is None else site.step.index


def _known(tensors: KnownTensors) -> Table:
    rows = sorted(tensors.by_category.items(), key=lambda item: (-item[1], item[0].value))
    rest = tensors.rest
    return {
        "total": to_plain(rest if isinstance(rest, Unavailable) else tensors.known + rest),
        "rows": [
            {"key": category.value, "bytes": count, "blocks": None} for category, count in rows
        ],
        "remainder": {
            "what": "no tensor with a name explains it",
            "bytes": to_plain(rest),
            "blocks": None,
        },
    }


def _most_kept(leaks: dict[str, Any]) -> tuple[str, int, int] | None:
    """The line that leaves most behind in a step."""
    rows = leaks.get("rows") or ()
    most = max(rows, key=lambda row: row["bytes_per_step"], default=None)
    return None if most is None else (most["key"], most["bytes"], most["bytes_per_step"])


def _growth(growth: Growth, top: int) -> dict[str, Any]:
    return {
        "first_step": growth.first,
        "last_step": growth.last,
        "bytes": growth.bytes,
        "bytes_per_step": growth.per_step,
        "lines": _table(growth.lines, top, _line_row, "lines") if growth.lines else None,
    }


# -- steps


def _step(rank: RankRecording, step: Step) -> dict[str, Any]:
    outer = sum(phase.duration_ns for phase in step.phases if "/" not in phase.path)
    return {
        "rank": rank.session.rank,
        "index": step.index,
        "start_ns": step.start_ns,
        "duration_ns": step.duration_ns,
        "ended_by": step.ended_by,
        "host_rss_peak": _bounds(step.host.rss_peak),
        "devices": [
            {
                **_window(window),
                "peak_reserved": _bounds(window.peak_reserved),
                "end": _counts(window.end),
            }
            for window in step.windows
        ],
        "phases": [_phase(phase) for phase in step.phases],
        # Of the phases of depth one; 0 where they cover the step.
        "outside_phases_ns": step.duration_ns - outer,
    }


def _phase(phase: Phase) -> dict[str, Any]:
    return {
        "path": phase.path,
        "duration_ns": phase.duration_ns,
        "entries": phase.entries,
        "host_rss_peak": _bounds(phase.host.rss_peak),
        "devices": [_window(window) for window in phase.windows],
    }


def _window(window: DeviceWindow) -> dict[str, Any]:
    return {"device": window.device, "peak_allocated": _bounds(window.peak_allocated)}


def _time(rank: RankRecording) -> dict[str, Any] | None:
    """Where the first rank's time goes; null where it has no step."""
    shares = time_shares(rank.steps)
    if shares is None:
        return None
    return {
        "rank": rank.session.rank,
        "steps": shares.steps,
        "duration_ns": shares.duration_ns,
        "gpu_steps": shares.gpu_steps,
        "gpu_ns": shares.gpu_ns,
        "phases": [
            {"path": path, "ns": spent, "gpu_ns": shares.gpu_phases.get(path, 0)}
            for path, spent in shares.phases
        ],
        "outside_phases_ns": shares.between_ns,
        "collectives_ns": shares.collectives_ns,
        "collectives": [_with_defaults(call) for call in shares.collectives],
    }


def _highlights(site: PeakSite | None) -> dict[str, Any] | None:
    """The steps worth a row where there is no room for all: of the peak's rank."""
    if site is None or site.step is None:
        return None
    full = [step for step in site.rank.steps if step.ended_by != "end"] or site.rank.steps
    return {
        "rank": site.rank.session.rank,
        "device": site.device or None,
        "first": full[0].index,
        "worst": site.step.index,
        "last": full[-1].index,
        "slowest": max(full, key=lambda step: (step.duration_ns, -step.index)).index,
    }


# -- what could not be seen


def _blind_spots(
    recording: Recording,
    site: PeakSite | None,
    mark: HighWater | Unavailable,
    statuses: Sequence[str],
) -> list[dict[str, Any]]:
    """The recording's own, and those that follow from how it ended; each once."""
    found: dict[BlindSpot, list[int]] = {}

    def add(spot: BlindSpot, rank: RankRecording) -> None:
        found.setdefault(spot, []).append(rank.session.rank)

    absent = _absent_ranks(recording)
    if absent is not None:
        for rank in recording.ranks:
            add(absent, rank)
    for rank, status in zip(recording.ranks, statuses, strict=True):
        for spot in rank.blind_spots:
            add(spot, rank)
        if rank.end is None and recording.kind == "recording":
            add(_no_end(status), rank)
        for fault in rank.end.gpuprobe_faults if rank.end else ():
            consequence = "what was to be recorded after it is missing"
            add(BlindSpot(f"a fault inside gpuprobe: {fault}", consequence), rank)
    if site is not None and isinstance(mark, Unavailable) and mark.status is ReadStatus.ERROR:
        spot = BlindSpot(
            f"the trace of the peak: {mark.reason}",
            "no lines, modules or categories can be shown for it",
        )
        add(spot, site.rank)
    return [
        {"what": spot.what, "consequence": spot.consequence, "ranks": ranks}
        for spot, ranks in found.items()
    ]


def _absent_ranks(recording: Recording) -> BlindSpot | None:
    """The ranks of the job that recorded nothing here; None where all did."""
    present = {rank.session.rank for rank in recording.ranks}
    size = max(rank.session.world_size for rank in recording.ranks)
    # A number from a file: it is not counted up to.
    few = list(islice((rank for rank in range(size) if rank not in present), _FEW))
    if not few:
        return None
    count = size - sum(rank < size for rank in present)
    listed = ", ".join(map(str, few)) + (", …" if count > len(few) else "")
    return BlindSpot(
        f"{'a rank' if count == 1 else f'{count} ranks'} of the job's {size} "
        f"(rank {listed}): nothing of {'it' if count == 1 else 'them'} is in this recording",
        f"{'its' if count == 1 else 'their'} peak may be higher than the one shown",
    )


def _no_end(status: str) -> BlindSpot:
    if status == "killed":
        return BlindSpot(
            "how the program ended: it was killed before the recording was closed",
            "what happened after the last step on record is unknown",
        )
    if status == "running":
        return BlindSpot("the rest of the program: it is still running", "the peak may yet rise")
    return BlindSpot(
        "how the program ended: the recording has no end (it is running, or was killed)",
        "what happened after the last step on record is unknown",
    )
