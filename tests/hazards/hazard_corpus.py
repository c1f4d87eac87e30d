"""Small programs that race, and look-alikes that do not; each with where it comes from."""

from __future__ import annotations

import corpus_host
import corpus_memory
import corpus_order
import corpus_training
from hazard_case import Case

__all__ = ["CASES", "Case"]

CASES: tuple[Case, ...] = (
    *corpus_order.CASES,
    *corpus_memory.CASES,
    *corpus_host.CASES,
    *corpus_training.CASES,
)
