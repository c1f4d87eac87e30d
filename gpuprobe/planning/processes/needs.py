"""What the processes need that an estimated program starts: each has its own CUDA context and
allocator on the GPUs that it uses.

Each leaves a file with the peaks of its virtual GPUs. It imports no torch: it is unpickled in
processes that have not imported it yet.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from gpuprobe.model.io.files import atomic_write
from gpuprobe.model.values import Bytes
from gpuprobe.planning.processes import ENDED

if TYPE_CHECKING:
    from gpuprobe.catalogue.gpu_model import GpuModel
    from gpuprobe.engines.base import EngineSession

_OF_PROCESSES: Final = 0.02
"""Of their reserved memory, to both sides, as for the ranks of a job: which blocks are reused
depends on addresses, and their allocations are not simulated in several orders."""


class Needs(NamedTuple):
    """A `StartInProcess` of `gpuprobe.sampler.processes.children`. ``steps``: a process ends,
    as if it called ``sys.exit(0)``, after so many optimizer steps.
    """

    folder: Path
    steps: int

    def __call__(self, since: float) -> _Process | None:
        from gpuprobe.engines.choice import current
        from gpuprobe.sampler.hooks.optimizer_steps import exit_after

        session = current()
        if session is None:
            return None
        exit_after(self.steps, self._ended)
        return _Process(session, self.folder, since)

    def _ended(self) -> None:
        with contextlib.suppress(OSError):  # as in `_Process`
            (self.folder / f"{os.getpid()}{ENDED}").touch()


class _Process:
    def __init__(self, session: EngineSession, folder: Path, since: float) -> None:
        self._session = session
        self._file = folder / f"{os.getpid()}.json"
        self._since = since
        self._written: dict[int, list[int]] = {}

    def so_far(self) -> None:
        peaks = self._peaks()
        if peaks != self._written:
            self._write(peaks, None)

    def end(self, error: BaseException | None) -> None:
        self._write(self._peaks(), time.monotonic())

    def _peaks(self) -> dict[int, list[int]]:
        return {number: [*peaks] for number, peaks in self._session.peaks().items()}

    def _write(self, peaks: dict[int, list[int]], until: float | None) -> None:
        self._written = peaks
        found = {"since": self._since, "until": until, "devices": peaks}
        # An error means that the estimate is over: no other process reads it.
        with contextlib.suppress(OSError), atomic_write(self._file) as file:
            file.write(json.dumps(found).encode())


class Other(NamedTuple):
    """What other processes need on one GPU where they need the most at one time: so many of them;
    bytes, with their contexts.
    """

    processes: int
    low: Bytes
    high: Bytes


NOTHING: Final = Other(0, Bytes(0), Bytes(0))


class _Use(NamedTuple):
    since: float
    until: float
    reserved: int


def other_processes(folder: Path, models: Mapping[int, GpuModel]) -> tuple[int, dict[int, Other]]:
    """How many processes used a GPU, and what they need, by the GPU's number in the machine."""
    uses: dict[int, list[_Use]] = {}
    processes = 0
    for file in sorted(folder.glob("*.json")):
        found = json.loads(file.read_bytes())
        until = float("inf") if found["until"] is None else found["until"]
        processes += bool(found["devices"])
        for number, (_, reserved) in found["devices"].items():
            uses.setdefault(int(number), []).append(_Use(found["since"], until, reserved))
    needs = {}
    for number, found in uses.items():
        together = _most_at_once(found)
        reserved = sum(use.reserved for use in together)
        model = models[number]
        needs[number] = Other(
            len(together),
            Bytes(int(reserved * (1 - _OF_PROCESSES)) + len(together) * model.context_low),
            Bytes(int(reserved * (1 + _OF_PROCESSES)) + len(together) * model.context_high),
        )
    return processes, needs


def _most_at_once(uses: Sequence[_Use]) -> list[_Use]:
    """Those of one instant at which they reserve the most: a process begins while they all run."""

    def at(instant: float) -> list[_Use]:
        return [use for use in uses if use.since <= instant < use.until]

    return max(
        (at(use.since) for use in uses), key=lambda found: sum(use.reserved for use in found)
    )


def sentence(processes: int) -> str:
    """What an estimate assumes of them."""
    started = "1 process that uses" if processes == 1 else f"{processes} processes that use"
    return (
        f"{started} the GPU, started by the program: that they need the most when the program "
        "does, and at once if they were alive at the same time in this simulation"
    )
