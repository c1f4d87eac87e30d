"""The report as JSON: the document ``gpuprobe.report``.

An object has its dataclass's fields, all of them, under their names; `_SHAPES` lists the few
that differ. A row for a line of code has ``key`` (its text) and ``file``, ``line`` and
``function``, which are null if the line is unknown. An unknown value is
``{"unavailable": reason, "status": …}``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, is_dataclass
from operator import attrgetter
from typing import Any, TextIO

from gpuprobe.model.findings import Finding
from gpuprobe.model.io.codec import to_plain
from gpuprobe.model.io.document import header
from gpuprobe.model.io.document import write as write_document
from gpuprobe.model.memory import AllocatorCounts
from gpuprobe.model.place import NoPlace, Place
from gpuprobe.model.report import (
    FindingRow,
    RankTime,
    Report,
    TimeShares,
)
from gpuprobe.model.run.recording import StepRow, StepRows
from gpuprobe.model.run.session import DeviceWindow, Phase, Step
from gpuprobe.model.values import Peak, Unavailable
from gpuprobe.reporters.json import schema as load_schema

SCHEMA = "gpuprobe.report"

VERSION = (2, 7)
"""(major, minor). A minor version adds keys; a major one may change them.

History:
* 1.0: first version.
* 1.1: ``peak.nearest_trace``, for a peak in a step without a trace; ``fragmentation.step``.
* 1.2: ``beside_tensors.devices`` are those of all ranks, with their ``rank``; before, of the
  first. ``out_of_memory`` covers all ranks and devices, with the ``rank``; before, the peak's only.
* 1.3: ``session.virtual``; ``rank_comparison.memory.lowest`` and ``.alike``; no ``time`` in it on
  virtual GPUs.
* 2.0: ``beside_tensors`` is ``non_tensor_memory``; every row of a line of code has ``file``,
  ``line`` and ``function`` (``out_of_memory.line`` is now its ``key``).
* 2.1: ``time.collectives[].wire``.
* 2.2: ``rank_comparison.groups``.
* 2.3: ``earlier_failures``; ``out_of_memory`` has the last 20 of each trace.
* 2.4: ``late_ns``, ``late_steps``, ``chance_ns``, ``stable`` and ``cause`` of
  ``rank_comparison.time``.
* 2.5: ``communication``.
* 2.6: ``compiled``; ``children``.
* 2.7: ``launches``.
"""


def to_document(report: Report) -> dict[str, Any]:
    """The report as what ``json.dumps`` takes."""
    return {**header(SCHEMA, VERSION), **_encode(report)}


def write(report: Report, stream: TextIO) -> None:
    """Write ``report`` as one JSON document, ASCII only."""
    write_document(to_document(report), stream)


def schema() -> dict[str, Any]:
    """The JSON Schema of the report."""
    return load_schema("report-2")


_SPREAD = "*"
"""In a shape: the value is an object whose keys stand among those of its owner."""

_SHAPES: dict[type, dict[str, str]] = {
    AllocatorCounts: {
        name: name for name in ("allocated", "pending", "cached", "reserved", "requested")
    },
    DeviceWindow: {
        "device": "device",
        "peak_allocated": "peak_allocated",
        "peak_reserved": "peak_reserved",
        "end": "end",
    },
    FindingRow: {"rank": "rank", _SPREAD: "finding"},
    Step: {
        "index": "index",
        "start_ns": "start_ns",
        "duration_ns": "duration_ns",
        "ended_by": "ended_by",
        "host_rss_peak": "host.rss_peak",
        "devices": "windows",
        "phases": "phases",
    },
    StepRow: {"rank": "rank", _SPREAD: "step", "outside_phases_ns": "outside_phases_ns"},
}
"""Keys, and the attributes they come from."""

_DERIVED: dict[type, tuple[str, ...]] = {
    RankTime: ("stands_out", "stable", "cause"),
    TimeShares: ("collectives_ns",),
}
"""Properties that are keys too."""


def _encode(value: Any) -> Any:
    kind = value.__class__
    if kind in _AS_IT_IS:
        return value
    encode = _ENCODERS.get(kind)
    if encode is None:
        encode = _ENCODERS[kind] = _encoder(kind)
    return encode(value)


def _encoder(kind: type) -> Callable[[Any], Any]:
    if not is_dataclass(kind):
        return to_plain
    shape = _SHAPES.get(kind)
    if shape is None:
        shape = {field.name: field.name for field in fields(kind)}
        shape |= {name: name for name in _DERIVED.get(kind, ())}
    # One key of a shape may be an object to spread: a part of the value, or a line of code.
    spread = next((key for key in shape if key in (_SPREAD, "key", "place")), None)
    part = attrgetter(shape[spread]) if spread else None
    encode_part = _encode if spread == _SPREAD else _key
    keys = [key for key in shape if key != spread]
    get = [attrgetter(shape[key]) for key in keys]

    def encode(value: Any) -> dict[str, Any]:
        plain: dict[str, Any] = {} if part is None else encode_part(part(value))
        for key, attribute in zip(keys, get, strict=True):
            item = attribute(value)
            plain[key] = item if item.__class__ in _AS_IT_IS else _encode(item)
        return plain

    return encode


def _key(key: str | Place | NoPlace) -> dict[str, Any]:
    if isinstance(key, Place):
        return {
            "key": str(key),
            "file": key.file or None,
            "line": key.line if key.file else None,
            "function": key.function or None,
        }
    if isinstance(key, NoPlace):
        return {"key": key.value, "file": None, "line": None, "function": None}
    return {"key": key}


def _phase(phase: Phase) -> dict[str, Any]:
    """Its windows are short: there are many of them."""
    return {
        "path": phase.path,
        "duration_ns": phase.duration_ns,
        "entries": phase.entries,
        "host_rss_peak": _encode(phase.host.rss_peak),
        "devices": [
            {"device": window.device, "peak_allocated": _encode(window.peak_allocated)}
            for window in phase.windows
        ],
    }


def _peak(peak: Peak) -> dict[str, Any]:
    return {"at_least": peak.at_least, "at_most": peak.at_most, "exact": peak.exact}


_AS_IT_IS = frozenset((bool, int, str, type(None)))

_ENCODERS: dict[type, Callable[[Any], Any]] = {
    tuple: lambda value: [_encode(item) for item in value],
    StepRows: lambda value: [_encode(item) for item in value],
    Finding: to_plain,
    Peak: _peak,
    Phase: _phase,
    Unavailable: to_plain,
}
