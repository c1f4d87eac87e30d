"""What a pane shows, as JSON-ready data. Knows nothing of Textual."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gpuprobe.api.live import (
    Section,
    Sentence,
    StepPeak,
    TraceInspector,
    TraceState,
    facts_of_ranks,
)
from gpuprobe.model.findings import Finding, to_document
from gpuprobe.model.io.codec import to_plain
from gpuprobe.model.io.document import header
from gpuprobe.model.run.recording import RankRecording, Recording
from gpuprobe.model.text import visible
from gpuprobe.model.values import Unavailable

SCHEMA = "gpuprobe.view"

VERSION = (2, 0)
"""(major, minor). A minor version adds keys. Sizes in bytes, durations in nanoseconds.

DeviceHistory:
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


def texts_of(section: Section, cwd: str = "") -> list[str]:
    """The sentences of a section, safe to print; paths below ``cwd`` without it."""
    below = cwd.rstrip("/") + "/"
    texts = [part.text for part in section.parts if isinstance(part, Sentence)]
    return [visible(text.replace(below, "") if cwd else text) for text in texts]


def of_sections(sections: Sequence[Section], cwd: str) -> dict[str, Any]:
    """Sentences under the titles of their sections."""
    return {"lines": {section.title: texts_of(section, cwd) for section in sections}}


def of_ranks(recording: Recording) -> dict[str, Any]:
    """The ranks side by side."""
    return {"ranks": [to_plain(facts) for facts in facts_of_ranks(recording)]}


def of_state(inspector: TraceInspector, state: TraceState) -> dict[str, Any]:
    """What was allocated at a position of a trace. ``groups`` and ``categories`` each sum to
    ``allocated``.
    """
    event = inspector.event(state.position)
    return {
        "device": inspector.device,
        "step": inspector.step,
        "position": state.position,
        "positions": len(inspector),
        "event": None if event is None else to_plain(event),
        "allocated": state.allocated,
        "pending": state.pending,
        "reserved": to_plain(state.reserved),
        "categories": {category.value: size for category, size in state.categories.items()},
        "grouping": state.grouping,
        "groups": [
            {
                "key": group.key,
                "bytes": group.bytes,
                "blocks": len(group.rows),
                "category": group.category.value,
            }
            for group in state.groups
        ],
    }


def of_findings(findings: Sequence[Finding]) -> dict[str, Any]:
    """The findings of a rank."""
    return {"findings": [to_document(finding) for finding in findings]}
