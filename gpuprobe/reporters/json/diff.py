"""A diff as JSON.

Schema ``gpuprobe.diff``, history:

* 1.0: first version. ``schemas/diff-1.json`` is its JSON Schema.
* 1.1: ``peaks[].compared``: which moments the rows compare where a peak has no trace.

Sizes are integers in bytes. A peak is ``{"at_least", "at_most", "exact"}``; a value that is not
known is ``{"unavailable": reason, "status": …}``. In each of ``rows.category``, ``rows.module``
and ``rows.line`` the deltas sum to the peak's ``delta`` or, where ``compared`` is not null, to
the difference of its two ``allocated``.
"""

from __future__ import annotations

import json
from importlib import resources
from typing import Any, TextIO

from gpuprobe.analysis.compare.diff import BY, Diff, DiffRow, PeakDiff
from gpuprobe.model.codec import to_plain
from gpuprobe.model.values import Peak, Unavailable

__all__ = ["SCHEMA", "VERSION", "document", "schema", "write"]

SCHEMA = "gpuprobe.diff"
VERSION = (1, 1)


def write(diff: Diff, stream: TextIO, by: tuple[str, ...] = BY) -> None:
    """Write ``diff`` as one JSON document, ASCII only."""
    json.dump(document(diff, by), stream, indent=2, allow_nan=False)
    stream.write("\n")


def document(diff: Diff, by: tuple[str, ...] = BY) -> dict[str, Any]:
    """The diff as plain data, with the breakdowns in ``by``."""
    return {
        "schema": SCHEMA,
        "version": list(VERSION),
        "before": diff.before,
        "after": diff.after,
        "cautions": list(diff.cautions),
        "peaks": [_peak(peak, by) for peak in diff.peaks],
    }


def schema() -> dict[str, Any]:
    """The JSON Schema (draft 2020-12) of the diff, as shipped in the package."""
    file = resources.files("gpuprobe.reporters.json") / "schemas" / "diff-1.json"
    loaded: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return loaded


def _peak(peak: PeakDiff, by: tuple[str, ...]) -> dict[str, Any]:
    return {
        "rank": peak.rank,
        "device": peak.device,
        "before": _bounds(peak.before) | {"phase": peak.phase_before},
        "after": _bounds(peak.after) | {"phase": peak.phase_after},
        "delta": to_plain(peak.delta),
        "compared": None
        if peak.compared is None
        else {
            side: {"step": one.step, "allocated": one.allocated, "below_peak": one.below_peak}
            for side, one in zip(("before", "after"), peak.compared, strict=True)
        },
        "rows": {name: _rows(peak.rows[name]) for name in by},
    }


def _bounds(peak: Peak | Unavailable) -> dict[str, Any]:
    if isinstance(peak, Unavailable):
        plain: dict[str, Any] = to_plain(peak)
        return plain
    return {"at_least": peak.at_least, "at_most": peak.at_most, "exact": peak.exact}


def _rows(rows: tuple[DiffRow, ...] | Unavailable) -> Any:
    if isinstance(rows, Unavailable):
        return to_plain(rows)
    return [
        {
            "key": row.key,
            "before": row.before,
            "after": row.after,
            "delta": row.delta,
            "blocks_before": row.blocks_before,
            "blocks_after": row.blocks_after,
            "status": row.status,
            "moved_from": row.moved_from,
        }
        for row in rows
    ]
