"""Memory that grows from step to step, and when it will run out.

The forecast is an interval of steps, or the reason why there is none. Its growth is Theil and Sen's
slope (the median of the slopes between all pairs of steps) with Sen's interval (1968: the slopes
whose ranks are Kendall's S away from the middle, 95 %). Neither assumes a distribution of the
noise, and single outliers do not move them. A trend must also hold in the later half of the steps,
so that a cache that fills up and then stops is not reported; the interval spans both.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import ceil, sqrt
from typing import Final

from gpuprobe.analysis.peak.peaks import HighWater, PeakSite, Share, by_line, high_water, window_of
from gpuprobe.errors import DataError
from gpuprobe.model.place import NoPlace, SourceLine
from gpuprobe.model.record import record
from gpuprobe.model.run.columns import INDEX, MISSING, TRACED
from gpuprobe.model.run.holders import Holder
from gpuprobe.model.run.recording import RankRecording
from gpuprobe.model.run.session import Step
from gpuprobe.model.text import human_bytes
from gpuprobe.model.values import ReadStatus, Unavailable

_WARM_UP = 2
"""Steps left out at the start: optimizer state is allocated in the first, and library workspaces
and the allocator's cache settle by the second."""

_LEAST_STEPS = 4
"""Fewer than this many steps after the warm-up show no trend."""

_MOSTLY = 0.8
"""The share of steps that must have grown: one evaluation in between may free something."""

MANY_STEPS: Final = 10_000
"""The steps of a long training: what each leaves behind matters by what these leave. Numbers for a
plot never do."""

MINIMUM_SHARE = 0.01
"""The share of the peak below which growth is ignored: lists of losses and counters grow too, and
are harmless."""


@record(frozen=True, slots=True)
class Growth:
    """Growth of one device's allocated memory from the end of ``first`` to that of ``last``.

    ``lines`` are the changes by source line between the high water marks of the first and the last
    traced step (bytes may be negative); empty if fewer than two such steps were traced.
    """

    first: int  # step indices
    last: int
    bytes: int
    lines: tuple[Share[SourceLine], ...] = ()

    @property
    def per_step(self) -> int:
        """Bytes per step, rounded towards zero."""
        return int(self.bytes / (self.last - self.first))


def keeper(holders: Iterable[Holder], steps: int, grown: int) -> Holder | None:
    """The one that may keep ``grown`` bytes, which were added in so many steps. It has at least a
    tensor for half of the steps, as it may have been found when half of them were over, and as
    much of the bytes; or graphs, of which not all that they keep may have been found.
    """
    enough = [one for one in holders if one.tensors + one.saved_tensors >= max(3, 0.4 * steps)]
    most = max(enough, key=lambda one: one.bytes + one.saved_bytes, default=None)
    if most is not None and 4 * (most.bytes + most.saved_bytes) >= grown:
        return most
    return max((one for one in enough if one.graphs), key=lambda one: one.graphs, default=None)


def _ends(site: PeakSite) -> list[tuple[int, int]]:
    """Rows of whole steps after the warm-up, with the bytes at their ends."""
    columns = site.rank.columns
    at_end = columns.number("end_allocated", site.device)
    full = list(columns.full_rows())
    return [(row, at_end[row]) for row in full[_WARM_UP:] if at_end[row] != MISSING]


def rise_of(site: PeakSite) -> int | None:
    """The bytes that the last step ended with beyond the first one after the warm-up, of however
    many steps added them; None for too few steps.
    """
    ends = _ends(site)
    return ends[-1][1] - ends[0][1] if len(ends) >= _LEAST_STEPS else None


def growth_of(
    site: PeakSite, least: float = MINIMUM_SHARE, within: int | None = None
) -> Growth | None:
    """The growth of the device of ``site``; None if there is no steady growth, or less than the
    share ``least`` of the peak in the steps of the recording, or in ``within`` such steps.
    """
    rank, device = site.rank, site.device
    if isinstance(site.amount, Unavailable):
        return None
    ends = _ends(site)
    if len(ends) < _LEAST_STEPS:
        return None
    grown = ends[-1][1] - ends[0][1]
    rises = sum(after > before for (_, before), (_, after) in pairwise(ends))
    times = 1.0 if within is None else within / (len(ends) - 1)
    if rises < _MOSTLY * (len(ends) - 1) or grown * times < least * site.amount.at_least:
        return None
    lines = _grown_lines(rank, device, [row for row, _ in ends])
    index = rank.columns.number(*INDEX)
    return Growth(
        first=index[ends[0][0]],
        last=index[ends[-1][0]],
        bytes=grown,
        lines=lines,
    )


def _grown_lines(
    rank: RankRecording, device: str, rows: list[int]
) -> tuple[Share[SourceLine], ...]:
    """The changes by line between the high water marks of the first and last traced step."""
    mark = rank.columns.mark(*TRACED)
    traced = [rank.steps[row] for row in rows if mark[row]]
    if len(traced) < 2:
        return ()
    early, late = (_mark(rank, step, device) for step in (traced[0], traced[-1]))
    if early is None or late is None:
        return ()
    before = {line.key: line for line in by_line(early)}
    after = {line.key: line for line in by_line(late)}
    none: Share[SourceLine] = Share(NoPlace.UNKNOWN, 0, 0)
    changes = []
    for key in before.keys() | after.keys():
        old, new = before.get(key, none), after.get(key, none)
        changes.append(Share(key, new.bytes - old.bytes, new.blocks - old.blocks))
    return tuple(sorted(changes, key=lambda line: (-line.bytes, str(line.key))))


def _mark(rank: RankRecording, step: Step, device: str) -> HighWater | None:
    """A step's high water mark; None if its trace cannot be read (a blind spot of the report)."""
    try:
        return next((high_water(t) for t in rank.traces.of(step) if t.device == device), None)
    except DataError:
        return None


LEAST_STEPS = 8
"""With fewer full steps than this after the warm-up, a trend is indistinguishable from noise."""

_MOST_STEPS = 64
"""Steps that are compared, evenly spread over the newest `_WINDOW`. 64 make 2,016 pairs."""

_WINDOW = 512
"""The newest steps that are considered: older ones have little value for a forecast."""

_Z = 1.96
"""The normal quantile of a two-sided interval of 95 %."""


@dataclass(frozen=True, slots=True)
class Forecast:
    """Growth in bytes per step, between ``slowest`` and ``fastest`` (95 %), over ``steps`` steps,
    the last of which is step ``last``; ``level`` bytes are in use now. ``limit`` is the available
    memory, ``soonest`` and ``latest`` the number of steps until it is used up: both `Unavailable`
    if the limit is unknown. ``soonest`` is 0 if the limit has been reached.
    """

    last: int
    steps: int
    level: int
    slowest: float
    fastest: float
    limit: int | Unavailable
    soonest: int | Unavailable
    latest: int | Unavailable

    def in_words(self) -> str:
        """``out of memory in 40–55 steps``, or the growth alone if the limit is unknown."""
        growth = _range(human_bytes(round(self.slowest)), human_bytes(round(self.fastest)))
        if isinstance(self.soonest, Unavailable) or isinstance(self.latest, Unavailable):
            return f"grows by {growth} per step"
        when = _range(f"{self.soonest:,}", f"{self.latest:,}")
        unit = "step" if self.soonest == self.latest == 1 else "steps"
        return f"out of memory in {when} {unit} (grows by {growth} per step)"


def _range(low: str, high: str) -> str:
    return low if low == high else f"{low}–{high}"


def forecast_of_steps(
    steps: Sequence[Step], device: str, limit: int | Unavailable
) -> Forecast | Unavailable:
    """The forecast for one device by the peaks of its full steps; with an empty ``device``, for the
    process by its resident memory. ``limit``: the highest possible peak in bytes.
    """
    levels = []
    for step in steps[-_WINDOW - _WARM_UP :]:
        if step.ended_by == "end" or step.index < _WARM_UP:
            continue
        window = window_of(step.windows, device) if device else None
        # If only bounds of the peak are known, the lower one follows the allocated memory.
        peak = window.peak_allocated if window else step.host.rss_peak
        if not isinstance(peak, Unavailable):
            levels.append((step.index, peak.at_least))
    return forecast(levels, limit)


def forecast(levels: Sequence[tuple[int, int]], limit: int | Unavailable) -> Forecast | Unavailable:
    """The forecast for (step, bytes) pairs, in the order of steps. `Unavailable`, with the reason,
    if there is no growth or if it may be noise.
    """
    if len(levels) < LEAST_STEPS:
        return _not_enough(f"{len(levels)} of {LEAST_STEPS} steps")
    whole = _interval(_spread(levels))
    late = _interval(_spread(levels[len(levels) // 2 :]))
    slowest, fastest = min(whole[0], late[0]), max(whole[1], late[1])
    last, level = levels[-1]
    # Less than a byte per step may be a rounding error.
    if fastest < 1 or whole[1] <= 0 or late[1] <= 0:
        return _not_enough(f"no growth in the last {len(levels)} steps")
    if slowest <= 0:
        return _not_enough(f"the growth in the last {len(levels)} steps may be noise")
    soonest: int | Unavailable
    latest: int | Unavailable
    if isinstance(limit, Unavailable):
        soonest = latest = limit
    else:
        left = max(0.0, float(limit - level))
        soonest, latest = ceil(left / fastest), ceil(left / slowest)
    return Forecast(last, len(levels), level, slowest, fastest, limit, soonest, latest)


def _not_enough(why: str) -> Unavailable:
    return Unavailable(f"not enough evidence: {why}", ReadStatus.NOT_COLLECTED)


def _spread(levels: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """At most `_MOST_STEPS` of the levels, evenly spread, the last one included."""
    count = len(levels)
    if count <= _MOST_STEPS:
        return list(levels)
    return [levels[(i + 1) * count // _MOST_STEPS - 1] for i in range(_MOST_STEPS)]


def _interval(levels: Sequence[tuple[int, int]]) -> tuple[float, float]:
    """Sen's 95 % interval for the slope. Equal levels reduce Kendall's variance."""
    slopes = sorted(
        (later - earlier) / (after - before)
        for index, (before, earlier) in enumerate(levels)
        for after, later in levels[index + 1 :]
    )
    n = len(levels)
    ties = Counter(level for _, level in levels).values()
    variance = (n * (n - 1) * (2 * n + 5) - sum(t * (t - 1) * (2 * t + 5) for t in ties)) / 18
    away = _Z * sqrt(variance)
    low = int((len(slopes) - away) / 2)
    high = ceil((len(slopes) + away) / 2)
    return slopes[max(0, low)], slopes[min(len(slopes) - 1, high)]
