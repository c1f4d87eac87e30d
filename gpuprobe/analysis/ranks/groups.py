"""Ranks that are alike, in one group each: a job of a thousand of them in a few rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from gpuprobe.analysis.ranks.stragglers import median_low
from gpuprobe.model.report import RankGroup, RankPeak
from gpuprobe.model.values import ReadStatus, Unavailable

ALIKE: Final = 0.01
"""Peaks of one group differ by at most this share of its highest."""

MOST_GROUPS: Final = 24
"""Of more groups, those in the middle become one."""

_NOT_TIMED = Unavailable("own times are not compared", ReadStatus.NOT_COLLECTED)


def rank_groups(
    peaks: Sequence[RankPeak], own_ns: Mapping[int, int], slow: frozenset[int] = frozenset()
) -> tuple[RankGroup, ...]:
    """Groups of ranks that peak alike, the highest first.

    ``own_ns``: own time per step of each rank, empty where it is not comparable. Ranks in ``slow``
    are not in a group with others.
    """
    ordered = sorted(peaks, key=lambda peak: (-peak.bytes, peak.rank))
    groups: list[list[RankPeak]] = []
    slow_groups: list[list[RankPeak]] = []
    for peak in ordered:
        of = slow_groups if peak.rank in slow else groups
        if of and peak.bytes >= (1 - ALIKE) * of[-1][0].bytes:
            of[-1].append(peak)
        else:
            of.append([peak])
    found = sorted(groups + slow_groups, key=lambda group: (-group[0].bytes, group[0].rank))
    if len(found) > MOST_GROUPS:
        half = MOST_GROUPS // 2
        middle = [peak for group in found[half : 1 - half] for peak in group]
        found = [*found[:half], middle, *found[1 - half :]]
    return tuple(_group(group, own_ns) for group in found)


def _group(peaks: Sequence[RankPeak], own_ns: Mapping[int, int]) -> RankGroup:
    own = [own_ns[peak.rank] for peak in peaks if peak.rank in own_ns]
    return RankGroup(
        ranks=tuple(sorted(peak.rank for peak in peaks)),
        devices=tuple(sorted({peak.device for peak in peaks})),
        lowest=min(peak.bytes for peak in peaks),
        highest=max(peak.bytes for peak in peaks),
        own_ns=median_low(own) if own else _NOT_TIMED,
    )
