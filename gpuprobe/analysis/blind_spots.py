"""What a recording could not see: its own blind spots, and those that follow from how it ended."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from gpuprobe.analysis.peak.high_water import HighWater
from gpuprobe.analysis.peak.peaks import PeakSite
from gpuprobe.model.report import BlindSpotRow
from gpuprobe.model.run.recording import RankRecording, Recording
from gpuprobe.model.run.session import BlindSpot
from gpuprobe.model.values import ReadStatus, Unavailable

_FEW = 8
"""Ranks that a sentence names."""


def blind_spots(
    recording: Recording,
    site: PeakSite | None,
    mark: HighWater | Unavailable,
    statuses: Sequence[str],
) -> tuple[BlindSpotRow, ...]:
    """Each once, with the ranks it is of. ``mark`` is that of the peak's ``site``."""
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
            add(_NO_END.get(status, _UNKNOWN_END), rank)
        for fault in rank.end.gpuprobe_faults if rank.end else ():
            consequence = "nothing was recorded after that"
            add(BlindSpot(f"an internal error of gpuprobe: {fault}", consequence), rank)
    if site is not None and isinstance(mark, Unavailable) and mark.status is ReadStatus.ERROR:
        spot = BlindSpot(
            f"the trace of the peak: {mark.reason}",
            "its lines, modules and categories are unavailable",
        )
        add(spot, site.rank)
    return tuple(
        BlindSpotRow(spot.what, spot.consequence, tuple(ranks)) for spot, ranks in found.items()
    )


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
        f"{'its' if count == 1 else 'their'} peak may be higher than shown",
    )


_AFTER = "nothing is known after the last recorded step"
_NO_END = {
    "killed": BlindSpot(
        "the end of the program: it was killed before the recording was closed", _AFTER
    ),
    "running": BlindSpot(
        "the rest of the program, which is still running", "the peak may still rise"
    ),
}
_UNKNOWN_END = BlindSpot(
    "the end of the program: the recording is not closed (still running, or killed)", _AFTER
)
