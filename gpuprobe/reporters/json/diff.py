"""A diff as JSON.

Sizes are integers in bytes. A peak is ``{"at_least", "at_most", "exact"}``; an unknown value is
``{"unavailable": reason, "status": …}``. In each of ``rows.category``, ``rows.module``
and ``rows.line`` the deltas sum to the peak's ``delta`` or, where ``compared`` is not null, to
the difference of its two ``allocated``.
"""

from __future__ import annotations

from typing import Any, TextIO

from gpuprobe.analysis.compare.diff import BY, Diff, DiffRow, PeakDiff
from gpuprobe.model.io.codec import to_plain
from gpuprobe.model.io.document import header
from gpuprobe.model.io.document import write as write_document
from gpuprobe.model.values import Peak, Unavailable
from gpuprobe.reporters.json import fields_of
from gpuprobe.reporters.json import schema as load_schema

SCHEMA = "gpuprobe.diff"
VERSION = (2, 1)
"""(major, minor); a minor version only adds keys.

History:
* 1.0: first version.
* 1.1: ``peaks[].compared``: what the rows compare where a peak has no trace.
* 2.0: ``gpuprobe``, the version that wrote it. ``schemas/diff-2.json``.
* 2.1: ``compiled``.
"""


def write(diff: Diff, stream: TextIO, by: tuple[str, ...] = BY) -> None:
    """Write ``diff`` as one JSON document, ASCII only."""
    write_document(document(diff, by), stream)


def document(diff: Diff, by: tuple[str, ...] = BY) -> dict[str, Any]:
    """The diff as plain data, with the breakdowns in ``by``."""
    return {
        **header(SCHEMA, VERSION),
        "before": diff.before,
        "after": diff.after,
        "cautions": list(diff.cautions),
        "peaks": [_peak(peak, by) for peak in diff.peaks],
        "compiled": {
            side: list(texts)
            for side, texts in zip(("before", "after"), diff.compiled, strict=True)
        },
    }


def schema() -> dict[str, Any]:
    """The JSON Schema (draft 2020-12) of the diff, as shipped in the package."""
    return load_schema("diff-2")


def _peak(peak: PeakDiff, by: tuple[str, ...]) -> dict[str, Any]:
    return {
        **fields_of(peak, "rank device"),
        "before": _bounds(peak.before) | {"phase": peak.phase_before},
        "after": _bounds(peak.after) | {"phase": peak.phase_after},
        "delta": to_plain(peak.delta),
        "compared": None
        if peak.compared is None
        else {
            side: fields_of(one, "step allocated below_peak")
            for side, one in zip(("before", "after"), peak.compared, strict=True)
        },
        "rows": {name: _rows(peak.rows[name]) for name in by},
    }


def _bounds(peak: Peak | Unavailable) -> dict[str, Any]:
    if isinstance(peak, Unavailable):
        plain: dict[str, Any] = to_plain(peak)
        return plain
    return {"at_least": peak.at_least, "at_most": peak.at_most, "exact": peak.exact}


_ROW = "key before after delta blocks_before blocks_after status moved_from"


def _rows(rows: tuple[DiffRow, ...] | Unavailable) -> Any:
    if isinstance(rows, Unavailable):
        return to_plain(rows)
    return [fields_of(row, _ROW) for row in rows]
