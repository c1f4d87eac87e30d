"""What steps leave behind: found however seldom, and not seen where memory only moves."""

from __future__ import annotations

import pytest

from gpuprobe.analysis.baseline.measure import _growth

KEPT = 100


@pytest.mark.parametrize(
    ("ends", "growth"),
    [
        ([5, 5, 5, 5, 5, 5], 0),
        ([5, 105, 205, 305], KEPT),
        ([5, 5, 5, 105, 105, 105, 205, 205], 29),  # every third step: 200 in 7, rounded up
        ([5, 105], KEPT),  # every step of those there are
        ([5, 5, 105, 105], 0),  # once: a cache that is filled, or too few steps to tell
        ([5, 105, 5, 105, 5], 0),  # to and fro
        ([5, 105, 5, 105, 5, 105], 0),
        ([5, 305, 105, 405, 205, 505], KEPT),  # to and fro, and what stays grows
        ([305, 205, 105, 5], 0),
        ([5, 6, 7, 8], 1),  # a byte a step
    ],
)
def test_what_is_never_given_back(ends: list[int], growth: int) -> None:
    assert _growth(ends) == growth
