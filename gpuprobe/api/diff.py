"""Comparing two recordings or snapshots."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gpuprobe.analysis.compare.diff import Diff
    from gpuprobe.model.run.recording import Recording

__all__ = ["diff"]


def diff(
    before: Recording | str | os.PathLike[str], after: Recording | str | os.PathLike[str]
) -> Diff:
    """Say what changed between the peaks of two recordings or torch snapshots, given as
    recordings or as paths.

    For each rank and device, ``peaks[i].rows["category"]`` (``"module"``, ``"line"``) sum
    exactly to the change of the peak, in bytes. Where a peak's step has no trace, the rows are of
    the highest steps that have one, which ``peaks[i].compared`` names, and sum to their
    difference. Rows are `Unavailable` where a side has no trace at all (level ``counters``); the
    peaks are compared all the same.

    Raises what `load` raises.
    """
    from gpuprobe.analysis.compare.diff import diff_recordings

    return diff_recordings(_loaded(before), _loaded(after))


def _loaded(recording: Recording | str | os.PathLike[str]) -> Recording:
    if isinstance(recording, (str, os.PathLike)):
        from gpuprobe.api.recordings import load

        return load(recording)
    return recording
