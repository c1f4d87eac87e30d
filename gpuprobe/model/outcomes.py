"""What commands have done that is neither a report nor a plan: files written, a program run."""

from __future__ import annotations

from typing import Annotated

from gpuprobe.model.record import record
from gpuprobe.model.values import Displayed


@record(frozen=True)
class WrittenFiles(Displayed):
    """The files that a command has written."""

    files: Annotated[tuple[str, ...], "absolute paths"]


@record(frozen=True)
class ProgramRun(Displayed):
    """A program that was run and recorded."""

    exit_code: Annotated[int, "of the program, as the shell gets it; negative for a signal"]
    failed: Annotated[str | None, "the exception that ended the program"]
    recordings: Annotated[
        tuple[str, ...],
        "absolute paths: that of the program first, then those of jobs that it started; none if "
        "nothing was recorded",
    ]
    hazards: Annotated[int | None, "races, without those of the baseline; null without --hazards"]
    assumed: Annotated[tuple[str, ...], "what the simulated GPU assumed about values"]
    unrecorded: Annotated[dict[str, int], "processes that are not recorded, by reason"]


@record(frozen=True)
class CudaTorchStatus(Displayed):
    """Whether simulated GPUs can run here."""

    ready: bool
    text: Annotated[str, "their torch, or why there is none"]
