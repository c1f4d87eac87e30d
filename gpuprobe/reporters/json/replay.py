"""A replay as a JSON document."""

from __future__ import annotations

from typing import Any, Final, TextIO

from gpuprobe.allocator.replay import Divergence, TraceReplay
from gpuprobe.allocator.results import ReplayResult, TraceResult
from gpuprobe.allocator.settings import to_conf
from gpuprobe.allocator.whatif import LIMITS, Range, WhatIfOutcome
from gpuprobe.model.io.document import header
from gpuprobe.model.io.document import write as write_document
from gpuprobe.reporters.json import fields_of

SCHEMA: Final = "gpuprobe.replay"
VERSION: Final = (2, 1)
"""(major, minor); a minor version only adds keys.

History:
* 1.0: first version.
* 2.0: with all documents; nothing changed in this one.
* 2.1: a what-if has ``undecided``.
"""


def document(result: ReplayResult) -> dict[str, Any]:
    """The replay as plain data. Sizes are bytes; ``verified``: whether the what-if is based on an
    exact replay of the recording."""
    return {
        **header(SCHEMA, VERSION),
        "path": result.path,
        "exact": result.exact,
        "traces": [_trace(trace) for trace in result.traces],
        "limits": list(LIMITS) if any(t.baseline is not None for t in result.traces) else [],
    }


def write(result: ReplayResult, stream: TextIO) -> None:
    """Write one JSON document, ASCII only."""
    write_document(document(result), stream)


def _trace(trace: TraceResult) -> dict[str, Any]:
    plain = _recorded(trace.recorded)
    if trace.baseline is not None:
        plain["verified"] = trace.recorded.exact
        plain["capacity"] = trace.capacity
        plain["baseline"] = _outcome(trace.baseline)
    if trace.what_if is not None:
        plain["what_if"] = _outcome(trace.what_if)
    if trace.advice is not None:
        best = trace.advice.best
        plain["search"] = {
            "best": None if best is None else _outcome(best),
            "gain": trace.advice.gain,
            "fits": trace.advice.fits,
            "tried": [_outcome(outcome) for outcome in trace.advice.tried],
        }
    return plain


def _recorded(replay: TraceReplay) -> dict[str, Any]:
    return {
        **fields_of(replay, "device step exact"),
        "first_divergence": _divergence(replay.first_divergence),
        "settings": to_conf(replay.settings),
        **fields_of(replay, _FIGURES),
        "notes": list(replay.notes),
    }


_FIGURES: Final = (
    "complete events allocations peak_allocated peak_reserved start_reserved final_allocated "
    "final_reserved device_allocs device_frees retries ooms memory_limit tie_rule"
)


def _divergence(divergence: Divergence | None) -> dict[str, Any] | None:
    if divergence is None:
        return None
    return fields_of(divergence, "event action expected observed why")


def _outcome(outcome: WhatIfOutcome) -> dict[str, Any]:
    return {
        "change": outcome.change,
        "settings": to_conf(outcome.settings),
        "peak_allocated": _range(outcome.peak_allocated),
        "peak_reserved": _range(outcome.peak_reserved),
        "fragmentation_ppm": _range(outcome.fragmentation),
        "device_allocs": _range(outcome.device_allocs),
        "device_frees": _range(outcome.device_frees),
        "retries": _range(outcome.retries),
        "ooms": _range(outcome.ooms),
        "would_oom": outcome.would_oom,
        "served_after_all": _range(outcome.served_after_all),
        "address_orders": outcome.orders,
        "undecided": list(outcome.undecided),
    }


def _range(value: Range) -> dict[str, int]:
    return fields_of(value, "least most")
