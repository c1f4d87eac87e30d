"""Small programs that race, and look-alikes that do not; each with where it comes from.

For each path of the code there are six programs or all that had it, of the 429 of commit b31fc386.
"""

from __future__ import annotations

import corpus_collectives
import corpus_deletions
import corpus_graphs
import corpus_host
import corpus_memory
import corpus_offloads
import corpus_order
import corpus_reports
import corpus_training
import corpus_users
from hazard_case import Case

__all__ = ["CASES", "Case"]

CASES: tuple[Case, ...] = (
    *corpus_order.CASES,
    *corpus_memory.CASES,
    *corpus_host.CASES,
    *corpus_training.CASES,
    *corpus_graphs.CASES,
    *corpus_reports.CASES,
    *corpus_users.CASES,
    *corpus_collectives.CASES,
    *corpus_offloads.CASES,
    *corpus_deletions.CASES,
)
