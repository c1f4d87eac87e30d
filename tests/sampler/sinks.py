"""Sinks for sampler tests: one that keeps everything, and ones that fail like a disk does."""

from __future__ import annotations

import errno

from gpuprobe.model.findings import Finding
from gpuprobe.model.run.recording import RankRecording
from gpuprobe.model.run.session import (
    BlindSpot,
    Environment,
    HeldRows,
    LaterUses,
    Session,
    SessionEnd,
    Step,
)
from gpuprobe.model.trace import MemoryTrace


class KeepingSink:
    """Keeps what is written, as a reader would see it: a later step replaces an earlier one."""

    def __init__(self) -> None:
        self.sessions: list[tuple[Session, Environment]] = []
        self.by_index: dict[int, Step] = {}
        self.traces: dict[str, MemoryTrace] = {}
        self.uses: list[LaterUses] = []
        self.held_rows: list[HeldRows] = []
        self.findings: list[Finding] = []
        self.blind_spots: list[BlindSpot] = []
        self.ends: list[SessionEnd] = []
        self.closed = False

    @property
    def rank(self) -> RankRecording:
        """What was written, as it is read."""
        session, environment = self.sessions[-1]
        return RankRecording(session, environment, self.steps)

    @property
    def steps(self) -> list[Step]:
        return [self.by_index[i] for i in sorted(self.by_index)]

    def session(self, session: Session, environment: Environment) -> None:
        self.sessions.append((session, environment))

    def step(self, step: Step) -> None:
        self.by_index[step.index] = step

    def trace(self, trace: MemoryTrace) -> str:
        name = f"trace-{len(self.traces)}"
        self.traces[name] = trace
        return name

    def later_uses(self, uses: LaterUses) -> None:
        self.uses.append(uses)

    def held(self, held: HeldRows) -> None:
        self.held_rows.append(held)

    def finding(self, finding: Finding) -> None:
        self.findings.append(finding)

    def blind_spot(self, spot: BlindSpot) -> None:
        self.blind_spots.append(spot)

    def end(self, end: SessionEnd) -> None:
        self.ends.append(end)

    def close(self) -> None:
        self.closed = True


class FullDisk(KeepingSink):
    """From the step ``after`` on, every write fails as on a full disk."""

    def __init__(self, after: int) -> None:
        super().__init__()
        self.after = after

    def step(self, step: Step) -> None:
        if step.index >= self.after:
            raise OSError(errno.ENOSPC, "No space left on device")
        super().step(step)

    def trace(self, trace: MemoryTrace) -> str:
        if trace.step is not None and trace.step >= self.after:
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().trace(trace)


class Broken(KeepingSink):
    """A sink with a bug of its own: it raises something nobody expects."""

    def step(self, step: Step) -> None:
        raise ZeroDivisionError("a bug in the sink")
