"""What a pane shows, as JSON-ready data. Knows nothing of Textual."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gpuprobe.api.live import StepPeak, TraceInspector, TraceState
from gpuprobe.model.codec import to_plain
from gpuprobe.model.document import header
from gpuprobe.model.findings import Finding, to_document
from gpuprobe.model.run.recording import RankRecording
from gpuprobe.model.values import Unavailable

__all__ = ["SCHEMA", "VERSION", "document", "of_findings", "of_lines", "of_moment", "of_step"]

SCHEMA = "gpuprobe.view"

VERSION = (2, 0)
"""(major, minor). A minor version adds keys. Sizes in bytes, durations in nanoseconds.

History:
* 1.0: first version.
* 2.0: ``gpuprobe``, the version that wrote it; a finding is as in every document.
"""


def document(name: str, rank: int, pane: str, shown: dict[str, Any]) -> dict[str, Any]:
    """The whole: which recording, rank and pane it is of, and what the pane shows."""
    head = header(SCHEMA, VERSION)
    return {**head, "recording": name, "rank": rank, "pane": pane, **shown}


def of_step(rank: RankRecording, place: int, peak: StepPeak | Unavailable | None) -> dict[str, Any]:
    """The chosen step as it was recorded, and what was alive at its peak."""
    if not 0 <= place < len(rank.steps):
        return {"step": None}
    shown: dict[str, Any] = {"step": to_plain(rank.steps[place])}
    if peak is not None:
        shown["peak"] = to_plain(peak)
    return shown


def of_lines(lines: list[tuple[str, str]]) -> dict[str, Any]:
    """Lines of text under their names."""
    found: dict[str, list[str]] = {}
    name = ""
    for title, line in lines:
        name = title or name
        found.setdefault(name, []).append(line)
    return {"lines": found}


def of_moment(look: TraceInspector, moment: TraceState) -> dict[str, Any]:
    """What was allocated at a position of a trace. ``groups`` and ``categories`` each sum to
    ``allocated``.
    """
    event = look.event(moment.position)
    return {
        "device": look.device,
        "step": look.step,
        "position": moment.position,
        "positions": len(look),
        "event": None if event is None else to_plain(event),
        "allocated": moment.allocated,
        "pending": moment.pending,
        "reserved": to_plain(moment.reserved),
        "categories": {category.value: size for category, size in moment.categories.items()},
        "grouping": moment.grouping,
        "groups": [
            {
                "key": group.key,
                "bytes": group.bytes,
                "blocks": len(group.rows),
                "category": group.category.value,
            }
            for group in moment.groups
        ],
    }


def of_findings(findings: Sequence[Finding]) -> dict[str, Any]:
    """The findings of a rank."""
    return {"findings": [to_document(finding) for finding in findings]}
