"""Following a recording for its totals only, for as long as it is written.

`RecordingTail` keeps every step, which a screen needs; here each step is added up and forgotten,
so that a process that follows runs for weeks stays small.
"""

from __future__ import annotations

from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

from gpuprobe.errors import DataError, NotARecording
from gpuprobe.model.findings import Finding, Level
from gpuprobe.model.io.codec import from_plain
from gpuprobe.model.run.session import AllocatorActivity, Collective, DeviceWindow, Step
from gpuprobe.model.run.totals import (
    CollectiveTotals,
    DeviceTotals,
    FindingTotals,
    PhaseTotals,
    RankTotals,
)
from gpuprobe.model.values import Peak, Unavailable
from gpuprobe.recording.files import stream_names
from gpuprobe.recording.reader import StreamFile
from gpuprobe.recording.stream import StreamParser, same_finding

MAX_NAMES = 32
"""Names of one sort (phases, collectives, kinds of findings) that are kept apart; what has another
name is added up as ``other``. They come from the program: there could be any number of them. Of
devices, which cannot be added up, so many are kept."""

MAX_FINDINGS = 10_000
"""Findings that are known again when a later record replaces them."""

OTHER = "other"


class RankSum:
    """Adds up the steps and findings of one rank.

    A step with the index of the newest one replaces it, as the recorder writes it; one with an
    older index is ignored.
    """

    def __init__(self) -> None:
        self._steps = 0
        self._duration_ns = 0
        self._full: Step | None = None  # the newest full step that is added up
        self._newest: Step | None = None  # not added up yet: it may still be replaced
        self._phases: dict[str, int] = {}
        self._devices: dict[str, DeviceTotals] = {}
        self._in_full: frozenset[str] = frozenset()  # devices that a full step has
        self._rss_peak: Peak | Unavailable = Unavailable("not measured in any step")
        self._collectives: dict[str, CollectiveTotals] = {}
        self._findings: dict[tuple[str, Level], tuple[int, int]] = {}
        self._counts: dict[int, int] = {}  # hash of a finding -> how often it occurred

    def step(self, step: Step) -> None:
        if self._newest is not None:
            if step.index < self._newest.index:
                return
            if step.index > self._newest.index:
                self._add(self._newest)
        self._newest = step

    def finding(self, finding: Finding) -> None:
        kinds = {kind for kind, _ in self._findings}
        kind = _bounded(finding.kind, kinds)
        findings, count = self._findings.get((kind, finding.level), (0, 0))
        key = hash(same_finding(finding))
        before = self._counts.get(key)
        if before is not None:  # the same one, written again: it is known better now
            findings, count = findings - 1, count - before
        if before is not None or len(self._counts) < MAX_FINDINGS:
            self._counts[key] = finding.count
        self._findings[kind, finding.level] = (findings + 1, count + finding.count)

    def result(self, about: RankTotals) -> RankTotals:
        """``about`` with the totals so far."""
        whole = self if self._newest is None else self._with(self._newest)
        return replace(
            about,
            steps=whole._steps,
            duration_ns=whole._duration_ns,
            step=whole._full,
            newest=self._newest,
            phases=tuple(PhaseTotals(*item) for item in whole._phases.items()),
            devices=tuple(whole._devices.values()),
            rss_peak=whole._rss_peak,
            collectives=tuple(whole._collectives.values()),
            findings=tuple(
                FindingTotals(kind, level, findings, count)
                for (kind, level), (findings, count) in self._findings.items()
            ),
        )

    def _with(self, step: Step) -> RankSum:
        """A copy to which the step is added."""
        sums = copy(self)
        sums._phases = dict(self._phases)
        sums._devices = dict(self._devices)
        sums._collectives = dict(self._collectives)
        sums._add(step)
        return sums

    def _add(self, step: Step) -> None:
        if step.ended_by != "end":
            self._steps += 1
            self._duration_ns += step.duration_ns
            self._full = step
        for phase in step.phases:
            if "/" not in phase.path:
                name = _bounded(phase.path, self._phases)
                self._phases[name] = self._phases.get(name, 0) + phase.duration_ns
        for window in step.windows:
            known = self._devices.get(window.device)
            if known is not None or len(self._devices) < MAX_NAMES:
                full = step.ended_by != "end"
                state = None if full or window.device not in self._in_full else known
                self._devices[window.device] = _joined(known, window, state)
                if full:
                    self._in_full |= {window.device}
        self._rss_peak = _highest(self._rss_peak, step.host.rss_peak)
        for call in step.collectives:
            name = _bounded(call.op, self._collectives)
            self._collectives[name] = _called(self._collectives.get(name), name, call)


def _bounded(name: str, known: Any) -> str:
    return name if name in known or len(known) < MAX_NAMES - 1 else OTHER


def _joined(
    before: DeviceTotals | None, window: DeviceWindow, state: DeviceTotals | None
) -> DeviceTotals:
    """``before`` and the window; values of the newest step alone come from ``state`` if it is not
    None, else from the window."""
    after = DeviceTotals(
        window.device,
        window.end,
        window.peak_allocated,
        window.peak_reserved,
        window.peak_allocated,
        window.peak_reserved,
        window.activity,
    )
    if before is None:
        return after
    return replace(
        state or after,
        peak_allocated=_highest(before.peak_allocated, window.peak_allocated),
        peak_reserved=_highest(before.peak_reserved, window.peak_reserved),
        activity=_sum(before.activity, window.activity),
    )


def _highest(one: Peak | Unavailable, other: Peak | Unavailable) -> Peak | Unavailable:
    if isinstance(one, Unavailable):
        return other
    return one if isinstance(other, Unavailable) else one.joined(other)


def _sum(
    one: AllocatorActivity | Unavailable, other: AllocatorActivity | Unavailable
) -> AllocatorActivity | Unavailable:
    if isinstance(one, Unavailable):
        return other
    if isinstance(other, Unavailable):
        return one
    return AllocatorActivity(
        one.device_allocs + other.device_allocs,
        one.device_frees + other.device_frees,
        one.alloc_retries + other.alloc_retries,
        one.ooms + other.ooms,
    )


def _called(before: CollectiveTotals | None, name: str, call: Collective) -> CollectiveTotals:
    if before is None:
        return CollectiveTotals(name, call.count, call.bytes, call.host_ns)
    time = call.host_ns
    if isinstance(time, Unavailable):
        time = before.host_ns
    elif not isinstance(before.host_ns, Unavailable):
        time += before.host_ns
    return CollectiveTotals(name, before.count + call.count, before.bytes + call.bytes, time)


class _SumParser(StreamParser):
    """A parser that adds up instead of keeping."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.sum = RankSum()
        self._take["finding"] = lambda plain: self.sum.finding(from_plain(Finding, plain))
        self._take["blind_spot"] = self._take["gap"] = lambda plain: None

    def _take_step(self, plain: dict[str, object]) -> None:
        self.sum.step(from_plain(Step, plain))

    def totals(self) -> RankTotals | None:
        """What there is so far; None before the session began."""
        if self.session is None or self._environment is None:
            return None
        return self.sum.result(RankTotals(self.session, self._environment, end=self._end))


class TotalsTail:
    """Follows a recording that may still be written; each `poll` parses only what is new."""

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        self._streams: dict[int, StreamFile[_SumParser]] = {}
        self.behind = False  # whether more was there than the last poll was allowed to read

    def poll(self, budget: int) -> tuple[tuple[RankTotals, ...], int]:
        """The ranks so far, and the bytes that were read, about ``budget`` at most.

        If there is more to read than that, `behind` is set: the totals then cover a part of the
        file, and would look like a run that races ahead. Raises NotARecording if it is not a
        recording (any more), else what `read_recording` raises.
        """
        read = 0
        try:
            names = stream_names(self.path)
            if not names:
                raise NotARecording(f"{self.path} is not a recording: no rank's stream in it")
            for rank in self._streams.keys() - names.keys():
                del self._streams[rank]
            behind = False
            for rank, name in names.items():
                stream = self._streams.get(rank)
                if stream is None:
                    stream = self._streams[rank] = StreamFile(self.path / name, _SumParser)
                read += stream.read_on(max(0, budget - read))
                behind = behind or not stream.at_end
        except (FileNotFoundError, NotADirectoryError) as error:
            raise NotARecording(f"no such recording: {self.path}") from error
        except OSError as error:
            raise DataError(
                f"cannot read the recording {self.path}: {error.strerror or error}"
            ) from error
        self.behind = behind
        ranks = [self._streams[rank].parser.totals() for rank in sorted(self._streams)]
        return tuple(totals for totals in ranks if totals is not None), read
