"""The largest value that fits, by as few estimates as it takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, Final

from gpuprobe.errors import UsageError
from gpuprobe.model.plans.fit import Fit, Trial

_NARROW: Final = 24  # estimates of one search at most; as many tell 2^24 values apart


def check_bounds(least: int, most: int) -> None:
    """Raises UsageError where no value lies between them."""
    if not 1 <= least <= most:
        raise UsageError(f"no value between {least} and {most}")


def fit_of(tried: Mapping[int, Trial], **rest: Any) -> Fit:
    """The answer of a `search`; ``rest`` are the fields of `Fit` that the trials do not give."""
    trials = tuple(sorted(tried.values(), key=lambda item: item.value))
    fitting = [item for item in trials if item.fits]
    largest = fitting[-1].value if fitting else None
    return Fit(
        largest=largest,
        proof=fitting[-1] if fitting else None,
        beyond=next((t for t in trials if largest is not None and t.value > largest), None),
        trials=trials,
        unusual=_falling([item for item in trials if not item.failed]),
        **rest,
    )


def _falling(trials: Sequence[Trial]) -> tuple[int, ...]:
    """Values with more than a hundredth less need than the value before: that much is the
    allocator's rounding.
    """
    return tuple(
        after.value for before, after in pairwise(trials) if after.needed < 0.99 * before.needed
    )


def search(
    trial: Callable[[int], Trial],
    least: int,
    most: int,
    tried: dict[int, Trial] | None = None,
    coarse: int = 0,
    start: int = 0,
) -> dict[int, Trial]:
    """Estimates by value: among them the largest that fits and the one above it, if there is.

    From ``start`` (default ``least``) up in doubling steps, or down by halves where that does not
    fit; then between the bounds: where the straight line through the two needs meets the GPU's
    memory, and every third time by halves. ``coarse``: stop when the bounds are within this part
    of the lower one (100: a hundredth). ``tried``, if given, has what is known, and gets every
    estimate.
    """
    if tried is None:
        tried = {}

    def at(value: int) -> Trial:
        if value not in tried:
            tried[value] = trial(value)
        return tried[value]

    low = high = min(max(start, least), most)
    while not at(low).fits and low > least and len(tried) < _NARROW:
        low, high = max(least, low // 2), low
    if not at(low).fits:
        return tried
    while at(high).fits and high < most and len(tried) < _NARROW:
        low, high = high, min(most, high * 2)
    secants = 0
    while not at(high).fits and high - low > max(1, low // coarse if coarse else 1):
        if len(tried) >= _NARROW:
            break
        step = max(1, low // coarse if coarse else 1)
        # Needs are nearly straight, so that two lines often do; halves bound what is not.
        halve = secants == 2
        secants = 0 if halve else secants + 1
        middle = (low + high) // 2 if halve else _between(tried, low, high, step)
        if at(middle).fits:
            low = middle
        else:
            high = middle
    return tried


def _between(tried: dict[int, Trial], low: int, high: int, step: int) -> int:
    """A value between two bounds: where the straight line through the two needs meets the
    GPU's memory, kept ``step`` off the bounds so that the interval shrinks.
    """
    one, other = tried[low], tried[high]
    half = (low + high) // 2
    if other.failed or other.needed <= one.needed:
        return half
    guess = low + (one.capacity - one.needed) * (high - low) // (other.needed - one.needed)
    return max(min(max(guess, low + step), high - step), low + 1)
