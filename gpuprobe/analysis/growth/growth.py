"""Memory that is higher at the end of every step than at the end of the one before."""

from __future__ import annotations

from itertools import pairwise

from gpuprobe.analysis.peak.high_water import HighWater, Share, by_line, high_water
from gpuprobe.analysis.peak.peaks import PeakSite
from gpuprobe.errors import DataError
from gpuprobe.model.place import NoPlace, SourceLine
from gpuprobe.model.record import record
from gpuprobe.model.run.columns import INDEX, MISSING, TRACED
from gpuprobe.model.run.recording import RankRecording
from gpuprobe.model.run.session import Step
from gpuprobe.model.values import Unavailable

_WARM_UP = 2
"""Steps not looked at: optimizer state is allocated in the first, and library workspaces and the
allocator's cache settle by the second."""

_LEAST_STEPS = 4
"""Fewer than this many steps after the warm-up show no trend."""

_MOSTLY = 0.8
"""The share of steps that must have grown: one evaluation in between may free something."""

WORTH_SAYING = 0.01
"""Of the peak. Lists of losses and counters grow too, and do no harm."""


@record(frozen=True, slots=True)
class Growth:
    """Growth of one device's allocated memory from the end of ``first`` to that of ``last``.

    ``lines`` says which source lines had more at the high water mark of a later traced step
    than of an earlier one (bytes may be negative); empty where fewer than two such steps were
    traced.
    """

    first: int  # step indices
    last: int
    bytes: int
    lines: tuple[Share[SourceLine], ...] = ()

    @property
    def per_step(self) -> int:
        """Bytes per step, rounded towards zero."""
        return int(self.bytes / (self.last - self.first))


def growth_of(site: PeakSite) -> Growth | None:
    """The growth of the device that ``site`` is on; None where there is no steady one."""
    rank, device = site.rank, site.device
    if isinstance(site.amount, Unavailable):
        return None
    at_end = rank.columns.number("end_allocated", device)
    full = list(rank.columns.full_rows())
    ends = [(row, at_end[row]) for row in full[_WARM_UP:] if at_end[row] != MISSING]
    if len(ends) < _LEAST_STEPS:
        return None
    grown = ends[-1][1] - ends[0][1]
    rises = sum(after > before for (_, before), (_, after) in pairwise(ends))
    if rises < _MOSTLY * (len(ends) - 1) or grown < WORTH_SAYING * site.amount.at_least:
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
    """What changed by line between the high water marks of the first and last traced step."""
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
    """A step's high water mark, None where its trace cannot be read (the report says so)."""
    try:
        return next((high_water(t) for t in rank.traces_of(step) if t.device == device), None)
    except DataError:
        return None
