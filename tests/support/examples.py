"""How many examples a property draws."""

from __future__ import annotations

from hypothesis import settings

_LEAST = 8


def examples(count: int) -> int:
    """``count`` new ones in `make properties`. Otherwise each run draws the same ones: a third."""
    return max(_LEAST, count // 3) if settings.default.derandomize else count
