"""A watch for hazards as a JSON document."""

from __future__ import annotations

from typing import Annotated, Any, Final

from gpuprobe.hazards.findings.results import Hazards, SyncRow
from gpuprobe.hazards.rules import KINDS
from gpuprobe.model.findings import Finding
from gpuprobe.model.io.codec import from_plain
from gpuprobe.model.io.document import check_version
from gpuprobe.model.io.encoder import FINDING, keys
from gpuprobe.model.place import Place
from gpuprobe.model.record import record
from gpuprobe.model.values import Bounds, Count, OneOf, Rank
from gpuprobe.reporters.json.documents import Document


@record(frozen=True)
class RedundantWaits:
    """How often a wait was redundant."""

    location: Place | None
    count: int


@record(frozen=True)
class Watch:
    """The document."""

    operations: int
    findings: tuple[Finding, ...]
    syncs: Annotated[
        tuple[SyncRow, ...],
        "every line where the host waits for the GPU, including the intended ones",
    ]
    redundant_waits: Annotated[
        tuple[RedundantWaits, ...], "waits without which everything would still be in order"
    ]
    coverage: Annotated[tuple[str, ...], "blind spots"]
    self_waits: Annotated[
        tuple[Place | None, ...],
        "lines where a stream waits for itself, which orders nothing (GP210); since 1.1",
    ] = ()
    failed: Annotated[
        str | None, "how the program failed, if it did; the rest of it was not checked"
    ] = None
    ranks: tuple[int, ...] | None = None


def _operations(watch: Watch) -> Annotated[Count, "launches that were checked"]:
    return watch.operations


def _count(row: SyncRow | RedundantWaits) -> Annotated[int, Bounds(1)]:
    return row.count


def _seconds(
    row: SyncRow,
) -> Annotated[Annotated[float, Bounds(0)] | None, "time lost; null if it was not measured"]:
    return row.seconds


def _ranks(
    watch: Watch,
) -> Annotated[
    tuple[Rank, ...] | None, "the ranks whose results these are, if several were merged"
]:
    return watch.ranks


def _kind(finding: Finding) -> Annotated[str, OneOf(KINDS)]:
    return finding.kind


DOCUMENT: Final = Document(
    "gpuprobe.hazards",
    (2, 2),
    Watch,
    "What a watch for stream hazards and implicit synchronisations found. A minor version adds "
    "keys.",
    shapes={
        Finding: {**FINDING, "kind": _kind},
        RedundantWaits: keys("location", count=_count),
        SyncRow: keys(
            "reason location", count=_count, seconds=_seconds, **keys("allowed replacement")
        ),
        Watch: {
            "operations": _operations,
            **keys("findings syncs redundant_waits self_waits coverage failed"),
            "ranks": _ranks,
        },
    },
    added={"2.1": "failed ranks"},
)


def _watch(hazards: Hazards) -> Watch:
    return Watch(
        operations=hazards.operations,
        findings=tuple(hazards.findings),
        syncs=tuple(hazards.syncs),
        redundant_waits=tuple(RedundantWaits(place, count) for place, count in hazards.redundant),
        coverage=tuple(hazards.coverage),
        self_waits=tuple(hazards.self_waits),
        failed=hazards.failed or None,
        ranks=hazards.ranks or None,
    )


def document(hazards: Hazards) -> dict[str, Any]:
    """Everything that was found, as plain data."""
    return DOCUMENT.plain(_watch(hazards))


def from_document(document: dict[str, Any], where: str) -> Hazards:
    """What `document` was made of.

    ``where`` begins the messages. Raises UnsupportedSchema for a newer major version, DataError
    for data of another shape.
    """
    check_version(document, DOCUMENT.version, where)
    watch = from_plain(Watch, document, where)
    return Hazards(
        findings=list(watch.findings),
        syncs=list(watch.syncs),
        redundant=[(row.location, row.count) for row in watch.redundant_waits],
        coverage=list(watch.coverage),
        operations=watch.operations,
        self_waits=list(watch.self_waits),
        failed=watch.failed or "",
        ranks=watch.ranks or (),
    )
