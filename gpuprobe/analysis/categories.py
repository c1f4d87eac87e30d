"""What each block is for."""

from __future__ import annotations

from collections.abc import Sequence

from gpuprobe.analysis.ledger import Ledger, picked

__all__ = ["categories"]


def categories(book: Ledger, rows: Sequence[int]) -> tuple[int, ...]:
    """The `Category.code` of each of ``rows``."""
    return picked(book.category, rows)
