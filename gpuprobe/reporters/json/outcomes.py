"""What commands have done, and why they failed, as JSON documents."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Final

from gpuprobe.errors import GpuprobeError
from gpuprobe.model.io.encoder import NotEmpty, keys
from gpuprobe.model.outcomes import CudaTorchStatus, ProgramRun, WrittenFiles
from gpuprobe.model.record import record
from gpuprobe.model.run.totals import Run
from gpuprobe.model.values import Peak, Unavailable
from gpuprobe.reporters.json.documents import Document


@record(frozen=True)
class Failure:
    """Why a command failed."""

    kind: Annotated[NotEmpty, "a class of gpuprobe.errors, which decides the exit code"]
    message: NotEmpty
    hint: Annotated[str, "what to do next, or empty"]


@record(frozen=True)
class FailedCommand:
    """The document."""

    error: Failure


ERROR: Final = Document(
    "gpuprobe.error",
    (1, 0),
    FailedCommand,
    "What a command prints with --json in place of its result, if it fails.",
)
"""History: 1.0: first version."""


def error(failed: GpuprobeError) -> dict[str, Any]:
    """The document of an error."""
    return ERROR.plain(FailedCommand(Failure(type(failed).__name__, str(failed), failed.hint)))


WRITTEN: Final = Document(
    "gpuprobe.written", (1, 0), WrittenFiles, "The files that a command has written."
)
"""History: 1.0: first version."""

RUN: Final = Document(
    "gpuprobe.run",
    (1, 0),
    ProgramRun,
    "A program that was run and recorded. What it did is in its recordings.",
)
"""History: 1.0: first version."""

CUDA_TORCH: Final = Document(
    "gpuprobe.cuda-torch", (1, 0), CudaTorchStatus, "The torch that simulated GPUs run here."
)
"""History: 1.0: first version."""


@record(frozen=True)
class RunningProgram:
    """A recording that is being written. What its first rank has not written yet is null."""

    recording: str
    pids: tuple[int, ...]
    unreadable: Annotated[str | None, "why the recording cannot be read"]
    program: Annotated[tuple[str, ...] | None, "the command line"]
    level: str | None
    started_at: Annotated[float | None, "seconds since the Unix epoch"]
    ranks: int | None
    step: Annotated[int | None, "the newest step, from 0"]
    step_ns: Annotated[int | None, "its duration"]
    peak: Annotated[
        Peak | None, "bytes: the step's highest peak on a device; without a device, of the host"
    ]


@record(frozen=True)
class RunningPrograms:
    """The document."""

    runs: tuple[RunningProgram, ...]


RUNS: Final = Document(
    "gpuprobe.runs",
    (1, 0),
    RunningPrograms,
    "The programs that are being recorded on this machine.",
    shapes={Peak: keys("at_least at_most")},
)
"""History: 1.0: first version."""


def runs(recorded: Sequence[Run]) -> dict[str, Any]:
    """The document of the programs that are being recorded."""
    return RUNS.plain(RunningPrograms(tuple(map(_running, recorded))))


def _running(run: Run) -> RunningProgram:
    summary = run.summary
    if summary is None or isinstance(summary, Unavailable):
        reason = summary.reason if isinstance(summary, Unavailable) else None
        return RunningProgram(run.path, run.pids, reason, *[None] * 7)
    step, session = summary.step, summary.session
    return RunningProgram(
        run.path,
        run.pids,
        None,
        tuple(session.argv),
        session.level,
        session.started_at,
        summary.ranks,
        None if step is None else step.index,
        None if step is None else step.duration_ns,
        run.peak,
    )
