"""What ``gpuprobe doctor`` found: the findings, what passed, and what could not be checked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from gpuprobe.model.findings import Finding, Level
from gpuprobe.model.rules import Rule
from gpuprobe.model.values import Count, ReadStatus, Unavailable

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
