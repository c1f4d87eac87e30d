"""Bugs of public projects, and correct programs, that the engine was not written for."""

from __future__ import annotations

import correct_autograd
import correct_streams
import upstream_blind
import upstream_offloading
import upstream_serving
import upstream_training
from hazard_case import Case
from upstream_case import Bug

__all__ = ["BUGS", "CORRECT"]

BUGS: tuple[Bug, ...] = (
    *upstream_offloading.BUGS,
    *upstream_training.BUGS,
    *upstream_serving.BUGS,
    *upstream_blind.BUGS,
)
CORRECT: tuple[Case, ...] = (
    *correct_autograd.CASES,
    *correct_streams.CASES,
    *upstream_blind.CORRECT,
)
