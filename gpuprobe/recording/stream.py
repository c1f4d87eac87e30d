"""One rank's stream, parsed as its bytes arrive."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from gpuprobe.errors import DataError, NotARecording
from gpuprobe.model.findings import Finding
from gpuprobe.model.io.codec import from_plain
from gpuprobe.model.run.communication import check_operations
from gpuprobe.model.run.launches import check_launches
from gpuprobe.model.run.recording import RankRecording
from gpuprobe.model.run.session import (
    BlindSpot,
    Environment,
    Gap,
    HeldRows,
    LaterUses,
    Session,
    SessionEnd,
    Step,
)
from gpuprobe.model.run.work import check_work
from gpuprobe.model.trace import MemoryTrace
from gpuprobe.model.values import MOST_DEVICES
from gpuprobe.recording.chunks import RankTraces
from gpuprobe.recording.files import (
    MAX_DAMAGED,
    MAX_FINDINGS,
    MAX_LINE,
    Header,
    decode_header,
    may_be_stream,
)


def same_finding(finding: Finding) -> object:
    """The key of a finding. A later record with the same key replaces it."""
    text = finding.message if finding.location is None else ""  # without a place, the message
    return finding.fingerprint, finding.location, finding.related, text


def once_named(named: dict[int, tuple[str, ...]]) -> tuple[dict[int, tuple[str, ...]], int]:
    """For each row whose traces an earlier row has named, its own; and how many were left out. One
    small file could otherwise be read a million times.
    """
    known: set[str] = set()
    changed: dict[int, tuple[str, ...]] = {}
    repeated = 0
    for row in sorted(named):
        names = named[row]
        fresh = tuple(name for name in dict.fromkeys(names) if name not in known)
        known.update(fresh)
        if len(fresh) != len(names):
            repeated += len(names) - len(fresh)
            changed[row] = fresh
    return changed, repeated


class StreamParser:
    """Turns the bytes of a stream, in pieces of any size, into a `RankRecording`.

    ``name`` is the stream's file name, for messages. A damaged line (torn by a full disk, for
    example) is skipped and counted; a line without its end is kept until the rest arrives, and
    until then the stream is *truncated*.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.header: Header | None = None
        self.session: Session | None = None
        self._environment: Environment | None = None
        self._steps: dict[int, Step] = {}
        self._devices: set[str] = set()  # that steps have windows of
        self._findings: dict[object, Finding] = {}
        self._fingerprints: set[object] = set()  # of the findings
        self._excess = 0
        self._blind_spots: list[BlindSpot] = []
        self._later_uses: dict[str, list[LaterUses]] = {}  # by trace
        self._held: dict[str, list[HeldRows]] = {}  # likewise
        self._gap: Gap | None = None
        self._end: SessionEnd | None = None
        self._damaged = 0
        self._pending: list[bytes] = []  # pieces of the line that has no end yet
        self._pending_bytes = 0
        self._take: dict[str, Callable[[dict[str, object]], None]] = {
            "environment": self._take_environment,
            "session": self._take_session,
            "step": self._take_step,
            "later_uses": self._take_later_uses,
            "held": self._take_held,
            "finding": self._take_finding,
            "blind_spot": lambda plain: self._blind_spots.append(from_plain(BlindSpot, plain)),
            "gap": self._take_gap,
            "end": self._take_end,
        }

    def feed(self, data: bytes) -> None:
        """Parse the next bytes of the stream.

        Raises NotARecording, UnsupportedSchema or DataError where its header is wrong.
        """
        if not data:
            return
        first, *lines = data.split(b"\n")
        self._pending.append(first)
        self._pending_bytes += len(first)
        if lines:
            lines.insert(0, b"".join(self._pending))
            self._pending = [lines.pop()]
            self._pending_bytes = len(self._pending[0])
        if lines and self.header is None:
            self.header = decode_header(lines[0], self.name)
            self._pass_over(len(lines.pop(0)) + 1)
        self._take_lines(lines)
        if self.header is None and not may_be_stream(b"".join(self._pending)[:64]):
            raise NotARecording(
                f"{self.name}: does not begin with the header of a gpuprobe recording"
            )
        if self._pending_bytes > MAX_LINE:
            raise DataError(
                f"{self.name}: a line of more than {MAX_LINE >> 20} MiB is not a record"
            )

    @property
    def truncated(self) -> bool:
        """Whether the last line has no end: its writer is writing it, or has not finished it."""
        return self._pending_bytes > 0

    def result(
        self,
        load_trace: Callable[[str], MemoryTrace],
        extra_blind_spots: tuple[BlindSpot, ...] = (),
    ) -> RankRecording:
        """The recording as parsed so far. It needs a `session`. ``load_trace`` reads a chunk by its
        name.

        Steps are in the order of their index.
        """
        if self.session is None or self._environment is None:
            raise DataError(f"{self.name}: the recording has no session record")
        steps, repeated = self._sequence()
        spots = tuple(self._blind_spots) + extra_blind_spots
        if repeated:
            spots += (
                BlindSpot(
                    f"{repeated} trace chunks that steps of {self.name} name again",
                    "a chunk belongs to one step, the first that names it",
                ),
            )
        if self._excess:
            spots += (
                BlindSpot(
                    f"{self._excess:,} of the findings in {self.name}: more than {MAX_FINDINGS:,}",
                    "they are neither shown nor counted",
                ),
            )
        if self._damaged:
            lines = "1 damaged line" if self._damaged == 1 else f"{self._damaged} damaged lines"
            spots += (
                BlindSpot(
                    f"{lines} in {self.name} (a full disk, or a damaged file)",
                    "the steps or findings in them are missing",
                ),
            )
        if self._gap is not None:
            spots += (
                BlindSpot(
                    self._gap.text,
                    "memory in them may have been higher than shown",
                ),
            )

        held = {name: tuple(rows) for name, rows in self._held.items()}
        traces = RankTraces(load_trace, steps, self._later_uses, held, self._end)
        return RankRecording(
            session=self.session,
            environment=self._environment,
            steps=steps,
            findings=tuple(self._findings.values()),
            blind_spots=spots,
            gap=self._gap,
            damaged=self._damaged,
            end=self._end,
            traces=traces,
            held=held,
            truncated=self.truncated,
        )

    def _take_held(self, plain: dict[str, object]) -> None:
        held = from_plain(HeldRows, plain)
        self._held.setdefault(held.trace, []).append(held)

    def _take_later_uses(self, plain: dict[str, object]) -> None:
        uses = from_plain(LaterUses, plain)
        self._later_uses.setdefault(uses.trace, []).append(uses)

    def _pass_over(self, length: int) -> None:
        """So many bytes of the stream are no record."""

    def _take_lines(self, lines: list[bytes]) -> None:
        for line in lines:
            if line:  # an empty line is where a torn record was given up
                self._take_line(line)

    def _take_line(self, line: bytes) -> None:
        try:
            plain = json.loads(line)
            take = self._take.get(plain["type"])
            if take is not None:  # else a record that a newer minor version added
                take(plain)
        except (DataError, ValueError, TypeError, KeyError, RecursionError):
            self._damaged += 1
            if self._damaged > MAX_DAMAGED:
                raise DataError(
                    f"{self.name}: more than {MAX_DAMAGED} of its lines are damaged"
                ) from None

    def _take_environment(self, plain: dict[str, object]) -> None:
        self._environment = from_plain(Environment, plain)

    def _take_session(self, plain: dict[str, object]) -> None:
        self.session = from_plain(Session, plain)

    def _take_step(self, plain: dict[str, object]) -> None:
        step = self._checked_step(plain)
        self._steps[step.index] = step

    def _checked_step(self, plain: dict[str, object]) -> Step:
        step = from_plain(Step, plain)
        check_operations(step.exchanges)
        check_launches(step.launches)
        check_work(step.work)
        self._add_devices({window.device for window in step.windows})
        return step

    def _add_devices(self, named: Iterable[str]) -> None:
        """Raises DataError where the rank would have too many of them."""
        fresh = self._devices.union(named)
        if len(fresh) > MOST_DEVICES:
            raise DataError(f"more than {MOST_DEVICES} devices")
        self._devices = fresh

    def _sequence(self) -> tuple[Sequence[Step], int]:
        """The steps in order of their index, and how many names of traces were left out."""
        steps = [self._steps[at] for at in sorted(self._steps)]
        fresh, repeated = once_named({row: step.traces for row, step in enumerate(steps)})
        for row, names in fresh.items():
            steps[row] = replace(steps[row], traces=names)
        return tuple(steps), repeated

    def _take_finding(self, plain: dict[str, object]) -> None:
        full = len(self._findings) >= MAX_FINDINGS
        if full and plain.get("fingerprint") not in self._fingerprints:
            self._excess += 1
            return
        finding = from_plain(Finding, plain)
        key = same_finding(finding)
        if full and key not in self._findings:
            self._excess += 1
            return
        self._findings[key] = finding
        self._fingerprints.add(finding.fingerprint)

    def _take_gap(self, plain: dict[str, object]) -> None:
        self._gap = from_plain(Gap, plain)

    def _take_end(self, plain: dict[str, object]) -> None:
        self._end = from_plain(SessionEnd, plain)
