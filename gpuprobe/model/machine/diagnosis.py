"""What ``gpuprobe doctor`` found: the findings, what passed, and what could not be checked.

`Diagnosis` is about one machine; `RankDiagnosis` about the ranks of one distributed job.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from gpuprobe.model.findings import Finding, Level
from gpuprobe.model.rules import Rule
from gpuprobe.model.values import Bytes, Count, Nanoseconds, ReadStatus, Unavailable

SCHEMA_VERSION = (2, 1)
"""(major, minor) of the JSON document. A newer minor only adds keys."""

_NOT_COLLECTED = Unavailable("not collected", ReadStatus.NOT_COLLECTED)


@dataclass(frozen=True, slots=True)
class NotChecked:
    """A rule (or a part of one) that could not look, and why."""

    rule: Rule
    reason: str


@dataclass(frozen=True, slots=True)
class Advice:
    """What a kernel log message of the driver means, and what to do about it."""

    meaning: str
    action: str
    level: Level


@dataclass(frozen=True, slots=True)
class DeviceVerdict:
    """The findings about one GPU, the most severe first. ``name`` is its name in findings, such as
    ``GPU 3 (NVIDIA H100)``. ``not_checked`` is the number of checks that could not read a value of
    this GPU.
    """

    name: str
    findings: tuple[Finding, ...] = ()
    not_checked: Annotated[Count, "checks that could not read one of its values"] = 0

    @property
    def level(self) -> Level | None:
        """The level of the most severe finding; None without findings."""
        return self.findings[0].level if self.findings else None


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What the rules say of this machine. ``taken_at`` in seconds since the Unix epoch.

    ``driver`` is the driver's version, or why there is none. A rule is in ``passed`` when it
    looked at everything it reads and found nothing; a rule that could look at a part only is
    in ``not_checked``, and its findings are reported. ``verdicts`` has a row for each GPU.
    """

    taken_at: Annotated[float, "seconds since the Unix epoch"]
    driver: str | Unavailable = _NOT_COLLECTED
    torch: str | Unavailable = _NOT_COLLECTED
    devices: Count | Unavailable = _NOT_COLLECTED
    findings: tuple[Finding, ...] = ()
    passed: tuple[Rule, ...] = ()
    not_checked: tuple[NotChecked, ...] = ()
    demo: Annotated[str, "the fake fleet's name, empty for real hardware"] = ""
    verdicts: Annotated[tuple[DeviceVerdict, ...], "on each GPU"] = ()

    @property
    def healthy(self) -> bool:
        """Whether nothing was found at the level of a warning or an error."""
        return all(finding.level is Level.NOTE for finding in self.findings)


@dataclass(frozen=True, slots=True)
class RankPlace:
    """Where one rank runs. ``device`` is a GPU's UUID, or ``cpu``."""

    rank: int
    local_rank: int
    host: str
    pid: int
    device: Annotated[str, "a GPU's UUID, or cpu"]


@dataclass(frozen=True, slots=True)
class TransferSpeed:
    """All-reduces of one size. ``latency_ns``: the mean of one, on the slowest rank.

    ``bus_bandwidth`` in bytes per second follows nccl-tests: 2(n-1)/n times size over time,
    which does not depend on the number of ranks n where the links are the limit.
    """

    size: Bytes
    rounds: int
    latency_ns: Annotated[int, "of one all-reduce, on the slowest rank"]
    bus_bandwidth: Annotated[float, "bytes per second, by nccl-tests' definition"]


@dataclass(frozen=True, slots=True)
class LinkSpeed:
    """The fastest of some transfers of ``size`` bytes from one rank to the next, alone."""

    source: int
    target: int
    size: Bytes
    latency_ns: Annotated[int, "the fastest of some transfers"]


@dataclass(frozen=True, slots=True)
class ClockSkew:
    """How far a rank's clock is ahead of rank 0's, in nanoseconds, give or take ``error_ns``
    (half the fastest round trip: the answer was made some time within it).
    """

    rank: int
    ahead_ns: Annotated[int, "of rank 0's clock"]
    error_ns: Nanoseconds


@dataclass(frozen=True, slots=True)
class RankDiagnosis:
    """What the ranks of a job found together. Made by rank 0; every rank gets the findings,
    the tables are rank 0's. ``world_size`` is what this rank was started with; ``steps`` are the
    checks that ran and passed, in order. ``speaks``: whether this rank is the one to print
    the report; a rank that could not reach rank 0 speaks for itself.
    """

    rank: Annotated[int, "the rank that made the report"]
    world_size: Count | Unavailable = _NOT_COLLECTED
    backend: str | Unavailable = _NOT_COLLECTED
    joined: tuple[RankPlace, ...] = ()
    missing: tuple[int, ...] = ()
    findings: tuple[Finding, ...] = ()
    steps: tuple[str, ...] = ()
    not_checked: tuple[NotChecked, ...] = ()
    speeds: tuple[TransferSpeed, ...] = ()
    links: tuple[LinkSpeed, ...] = ()
    skews: tuple[ClockSkew, ...] = ()
    speaks: bool = True

    @property
    def healthy(self) -> bool:
        """Whether nothing was found at the level of a warning or an error."""
        return all(finding.level is Level.NOTE for finding in self.findings)
