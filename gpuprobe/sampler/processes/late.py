"""A recording that is created when something is written to it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

from gpuprobe.errors import GpuprobeError
from gpuprobe.model.findings import Finding
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
from gpuprobe.model.values import Unavailable
from gpuprobe.patching import patch, when_imported
from gpuprobe.sampler.base import Sink


class JobPlace(NamedTuple):
    """The rank of a process and the number of ranks, in the job of its default process group."""

    rank: int
    ranks: int


class LateSink:
    """Creates its recording at the first step in which GPU memory was allocated, the first trace or
    the first finding. By then a process that belongs to a job has joined it.
    """

    def __init__(
        self, create: Callable[[JobPlace | None], Sink], opened: Callable[[str | None], None]
    ) -> None:
        """``create`` raises GpuprobeError or OSError if it cannot; ``opened`` gets that as text, ""
        once the recording exists, and None if there was nothing to record.
        """
        self._create = create
        self._opened = opened
        self._lock = threading.RLock()
        self._sink: Sink | None = None
        self._failed = False
        self._about: tuple[Session, Environment] | None = None
        self._spots: list[BlindSpot] = []
        self._job: JobPlace | None = None
        when_imported("torch.distributed.distributed_c10d", self._follow_groups)

    def session(self, session: Session, environment: Environment) -> None:
        self._about = session, environment

    def step(self, step: Step) -> None:
        if self._sink is not None or step.ended_by != "end" or _allocated(step):
            sink = self._open()
            if sink is not None:
                sink.step(step)

    def trace(self, trace: MemoryTrace) -> str:
        sink = self._open()
        return "" if sink is None else sink.trace(trace)

    def later_uses(self, uses: LaterUses) -> None:
        if self._sink is not None:  # else no trace was written
            self._sink.later_uses(uses)

    def held(self, held: HeldRows) -> None:
        if self._sink is not None:
            self._sink.held(held)

    def finding(self, finding: Finding) -> None:
        sink = self._open()
        if sink is not None:
            sink.finding(finding)

    def blind_spot(self, spot: BlindSpot) -> None:
        if self._sink is not None:
            self._sink.blind_spot(spot)
        else:
            self._spots.append(spot)

    def end(self, end: SessionEnd) -> None:
        if self._sink is not None:
            self._sink.end(end)
        elif not self._failed:  # the process has allocated nothing
            self._opened("; ".join(end.gpuprobe_faults) or None)

    def close(self) -> None:
        if self._sink is not None:
            self._sink.close()

    def _open(self) -> Sink | None:
        with self._lock:
            if self._sink is None and not self._failed and self._about is not None:
                self._note_job()
                try:
                    sink = self._create(self._job)
                except (GpuprobeError, OSError) as error:
                    self._failed = True
                    self._opened(str(error))
                    return None
                session, environment = self._about
                if self._job is not None:
                    rank, ranks = self._job
                    session = replace(session, rank=rank, local_rank=rank, world_size=ranks)
                self._sink = sink
                self._opened("")
                # What cannot be written, the writer notes, or writes before the next record.
                with contextlib.suppress(OSError):
                    sink.session(session, environment)
                for spot in self._spots:
                    with contextlib.suppress(OSError):
                        sink.blind_spot(spot)
            return self._sink

    def _follow_groups(self) -> None:
        """Note the job when the process joins one: it may have left it when a step is written."""
        from torch.distributed import distributed_c10d

        module: Any = distributed_c10d
        self._note_job()
        original = getattr(module, "_update_default_pg", None)
        if original is not None:

            def update(group: object) -> None:
                original(group)
                self._note_job()

            patch(module, "_update_default_pg", update)

    def _note_job(self) -> None:
        import torch.distributed

        if self._job is None and torch.distributed.is_available():
            initialized = torch.distributed.is_initialized()
            ranks = torch.distributed.get_world_size() if initialized else 1
            if ranks > 1:
                self._job = JobPlace(torch.distributed.get_rank(), ranks)


def _allocated(step: Step) -> bool:
    peaks = (window.peak_allocated for window in step.windows if window.device != "cpu")
    return any(not isinstance(peak, Unavailable) and peak.at_most > 0 for peak in peaks)
