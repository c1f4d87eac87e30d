"""A diff as JSON.

Sizes are integers in bytes. A peak is ``{"at_least", "at_most", "exact"}``; an unknown value is
``{"unavailable": reason, "status": …}``. In each of ``rows.category``, ``rows.module``,
``rows.line`` and ``rows.need`` the deltas sum to the peak's ``delta`` or, where ``compared`` is not
null, to the difference of its two ``allocated``.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, Final

from gpuprobe.analysis.compare.diff import BY, Compared, Diff, DiffRow, PeakDiff
from gpuprobe.model.io.encoder import keys
from gpuprobe.model.record import record
from gpuprobe.model.values import Bytes, Peak, ReadStatus, Size, Unavailable
from gpuprobe.reporters.json.documents import Document


@record(frozen=True)
class KnownPeak:
    """The peak of one run in bytes, exact or between two bounds, and the phase that it was in."""

    at_least: Bytes
    at_most: Bytes
    exact: bool
    phase: str


@record(frozen=True)
class UnknownPeak:
    """The reason why the peak of one run is unknown."""

    unavailable: str
    status: ReadStatus
    phase: str


@record(frozen=True)
class Moments:
    """The moments that the rows compare."""

    before: Compared
    after: Compared


@record(frozen=True)
class Compiled:
    """Results of torch.compile: graphs, graph breaks and recompilations, with lines and reasons."""

    before: tuple[str, ...]
    after: tuple[str, ...]


def _compiled(diff: Diff) -> Compiled:
    return Compiled(*diff.compiled)


def _side(peak: Peak | Unavailable, phase: str) -> KnownPeak | UnknownPeak:
    if isinstance(peak, Unavailable):
        return UnknownPeak(peak.reason, peak.status, phase)
    return KnownPeak(Bytes(peak.at_least), Bytes(peak.at_most), peak.exact, phase)


def _before(peak: PeakDiff) -> KnownPeak | UnknownPeak:
    return _side(peak.before, peak.phase_before)


def _after(peak: PeakDiff) -> KnownPeak | UnknownPeak:
    return _side(peak.after, peak.phase_after)


def _size_before(row: DiffRow) -> Size:
    return row.before


def _size_after(row: DiffRow) -> Size:
    return row.after


def _moments(
    peak: PeakDiff,
) -> Annotated[Moments | None, "which moments the rows compare if a peak has no trace"]:
    return None if peak.compared is None else Moments(*peak.compared)


DOCUMENT: Final = Document(
    "gpuprobe.diff",
    (2, 4),
    Diff,
    "What changed between the peaks of two runs. Sizes are bytes. In each table the deltas of the "
    "rows sum to the delta of the peak or, where compared is not null, to the difference of its "
    "two moments. A minor version adds keys.",
    shapes={
        Diff: keys("before after cautions peaks step_time", compiled=_compiled),
        DiffRow: {
            "key": "key",
            "before": _size_before,
            "after": _size_after,
            **keys("delta blocks_before blocks_after status moved_from need"),
        },
        PeakDiff: {
            **keys("rank device"),
            "before": _before,
            "after": _after,
            "delta": "delta",
            "compared": _moments,
            "rows": "rows",
        },
    },
    added={
        "2.1": "compiled",
        "2.2": "DiffRow.need",
        "2.3": "step_time",
        "2.4": "MeasuredStepTime.collectives_ns MeasuredStepTime.waits MeasuredStepTime.clock",
    },
)


def document(diff: Diff, by: tuple[str, ...] = BY) -> dict[str, Any]:
    """The diff as plain data, with the breakdowns in ``by``."""
    return DOCUMENT.plain(_with_tables(diff, by))


def _with_tables(diff: Diff, by: tuple[str, ...]) -> Diff:
    """The diff with the breakdowns in ``by`` alone, in this order."""
    peaks = [replace(peak, rows={name: peak.rows[name] for name in by}) for peak in diff.peaks]
    return replace(diff, peaks=tuple(peaks))
