"""When memory will run out, if it goes on as it did: an interval of steps, or why none.

The growth is Theil and Sen's slope (the median of the slopes between all pairs of steps) with
Sen's interval for it (1968: the slopes whose ranks are Kendall's S away from the middle, 95 %).
It takes no shape of the noise for granted, and single odd steps do not move it. A trend must
also hold in the later half of the steps, so that a cache that fills up and then stops is no
leak; the interval spans both.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, sqrt

from gpuprobe.analysis.peak.peaks import window_of
from gpuprobe.model.run.session import Step
from gpuprobe.model.text import human_bytes
from gpuprobe.model.values import ReadStatus, Unavailable

_WARM_UP = 2
"""Steps left out: optimizer state is allocated in the first, library workspaces by then."""

LEAST_STEPS = 8
"""Fewer full steps than this after the warm-up tell no trend from noise."""

_MOST_STEPS = 64
"""Steps looked at: evenly spread ones of the newest `_WINDOW`. 64 make 2,016 pairs."""

_WINDOW = 512
"""How far back a trend is looked for. What happened long ago says little of what comes."""

_Z = 1.96
"""The normal quantile of a two-sided interval of 95 %."""


@dataclass(frozen=True, slots=True)
class Forecast:
    """Growth in bytes per step, between ``slowest`` and ``fastest`` (95 %), seen over ``steps``
    steps that ended with step ``last``; ``level`` bytes are held now. ``limit`` is where memory
    ends, ``soonest`` and ``latest`` the number of steps until then: both `Unavailable` where the
    limit is not known. ``soonest`` is 0 where the limit has been reached.
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
        """``out of memory in 40–55 steps``, or what grows where the limit is not known."""
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
    """The forecast for one device by the peaks of its full steps, or with an empty ``device``
    for the process by its resident memory. ``limit`` in bytes: what the peak can reach.
    """
    levels = []
    for step in steps[-_WINDOW - _WARM_UP :]:
        if step.ended_by == "end" or step.index < _WARM_UP:
            continue
        window = window_of(step.windows, device) if device else None
        # Where the peak is known between bounds only, its lower one moves with what is held.
        peak = window.peak_allocated if window else step.host.rss_peak
        if not isinstance(peak, Unavailable):
            levels.append((step.index, peak.at_least))
    return forecast(levels, limit)


def forecast(levels: Sequence[tuple[int, int]], limit: int | Unavailable) -> Forecast | Unavailable:
    """The forecast for (step, bytes) pairs, steps rising. `Unavailable` where no growth can be
    told from noise; its reason says which.
    """
    if len(levels) < LEAST_STEPS:
        return _not_enough(f"{len(levels)} of {LEAST_STEPS} steps")
    whole = _interval(_spread(levels))
    late = _interval(_spread(levels[len(levels) // 2 :]))
    slowest, fastest = min(whole[0], late[0]), max(whole[1], late[1])
    last, level = levels[-1]
    # Below a byte a step nothing grows that a float could not have made up.
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
    """At most `_MOST_STEPS` of the levels, evenly, the last among them."""
    count = len(levels)
    if count <= _MOST_STEPS:
        return list(levels)
    return [levels[(i + 1) * count // _MOST_STEPS - 1] for i in range(_MOST_STEPS)]


def _interval(levels: Sequence[tuple[int, int]]) -> tuple[float, float]:
    """Sen's 95 % interval for the slope. Ties of levels make Kendall's variance smaller."""
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
