"""A rank's recording, summed up: the totals of a long run so far, in bounded memory."""

from __future__ import annotations

from dataclasses import dataclass, field

from gpuprobe.model.findings import Level
from gpuprobe.model.memory import AllocatorCounts
from gpuprobe.model.record import record
from gpuprobe.model.run.session import (
    AllocatorActivity,
    Environment,
    Gap,
    Session,
    SessionEnd,
    Step,
)
from gpuprobe.model.values import Peak, Unavailable

_NOT_MEASURED = Unavailable("not measured in any step")


@dataclass(frozen=True, slots=True)
class DeviceTotals:
    """One device over all steps. ``end`` is at the end of the newest full step (see
    ``Step.ended_by``; without one, of the newest record), ``step_peak_*`` are that step's peaks,
    ``peak_*`` those of all records; bytes. ``activity`` is summed.
    """

    device: str
    end: AllocatorCounts
    step_peak_allocated: Peak | Unavailable = _NOT_MEASURED
    step_peak_reserved: Peak | Unavailable = _NOT_MEASURED
    peak_allocated: Peak | Unavailable = _NOT_MEASURED
    peak_reserved: Peak | Unavailable = _NOT_MEASURED
    activity: AllocatorActivity | Unavailable = _NOT_MEASURED


@dataclass(frozen=True, slots=True)
class PhaseTotals:
    """The time that all steps spent in one phase of depth one. Nanoseconds."""

    name: str
    duration_ns: int


@dataclass(frozen=True, slots=True)
class CollectiveTotals:
    """All calls of one operation; see `gpuprobe.model.run.session.Collective`."""

    op: str
    count: int
    bytes: int
    host_ns: int | Unavailable = _NOT_MEASURED  # of the calls whose time is known


@dataclass(frozen=True, slots=True)
class FindingTotals:
    """Findings of one kind and level: how many there are, and how often they occurred."""

    kind: str
    level: Level
    findings: int
    count: int


@dataclass(frozen=True, slots=True)
class RankTotals:
    """One rank so far.

    ``steps`` and ``duration_ns`` count full steps only: not what follows the last one (see
    ``Step.ended_by``); ``step`` is the newest of them, ``newest`` the newest record of any kind.
    """

    session: Session
    environment: Environment
    steps: int = 0
    duration_ns: int = 0
    step: Step | None = None
    newest: Step | None = None
    phases: tuple[PhaseTotals, ...] = ()
    devices: tuple[DeviceTotals, ...] = ()
    rss_peak: Peak | Unavailable = _NOT_MEASURED
    collectives: tuple[CollectiveTotals, ...] = ()
    findings: tuple[FindingTotals, ...] = field(default=())
    end: SessionEnd | None = None


@record(frozen=True, slots=True)
class RunSummary:
    """The session and the newest step of a recording's first rank.

    ``step`` is None before the first step. ``ranks`` counts the streams in the directory. ``gap``
    is what could not be written.
    """

    path: str
    ranks: int
    session: Session
    environment: Environment
    step: Step | None = field(default=None)
    end: SessionEnd | None = field(default=None)
    gap: Gap | None = field(default=None)


@record(frozen=True, slots=True)
class Run:
    """A recording that is being written. ``pids``: the processes that write it (and children of
    theirs). ``summary``: its session and newest step, None before the session begins.
    """

    path: str
    pids: tuple[int, ...]
    summary: RunSummary | Unavailable | None

    @property
    def peak(self) -> Peak | None:
        """The newest step's highest peak on a device, in bytes; without a device, of the host."""
        if not isinstance(self.summary, RunSummary) or self.summary.step is None:
            return None
        step = self.summary.step
        for peaks in ([w.peak_allocated for w in step.windows], [step.host.rss_peak]):
            known = [peak for peak in peaks if isinstance(peak, Peak)]
            if known:
                return max(known, key=lambda peak: peak.at_least)
        return None
