"""This machine for screens: its readings, its runs, and a log of readings."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gpuprobe.model.machine.devices import Inventory
from gpuprobe.probes.monitor import Monitor
from gpuprobe.reporters.text.info import (
    CALM_REASONS,
    device_names,
    error_lines,
    headline,
    missing,
    with_unit,
)
from gpuprobe.reporters.text.info import cells as device_cells
from gpuprobe.reporters.text.runs import HEAD as RUNS_HEADING
from gpuprobe.reporters.text.runs import line as run_line

if TYPE_CHECKING:
    from gpuprobe.model.machine.process import ProcessDetails
    from gpuprobe.model.run.totals import Run
    from gpuprobe.probes.host import end_process
    from gpuprobe.recording.monitor_log import MomentLog, ReplayedLog, last_moment

__all__ = [
    "CALM_REASONS",
    "RUNS_HEADING",
    "MomentLog",
    "Monitor",
    "ReplayedLog",
    "device_cells",
    "end_process",
    "errors_of",
    "headline",
    "last_moment",
    "missing",
    "process_details",
    "run_line",
    "runs",
    "with_unit",
]

# Used by few dashboards, so imported on use: 7 ms, mostly for the codec.
_DEFERRED = {
    "MomentLog": "gpuprobe.recording.monitor_log",
    "ReplayedLog": "gpuprobe.recording.monitor_log",
    "end_process": "gpuprobe.probes.host",
    "last_moment": "gpuprobe.recording.monitor_log",
}


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name not in _DEFERRED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_DEFERRED[name]), name)


def runs() -> list[Run]:
    """The recordings that processes of this user (for root: of all users) are writing, by path.

    Reads the open files of processes, and the beginning and end of each recording; creates no
    CUDA context. ``seen`` is the state of a recording, or why it cannot be read; a recording that
    is deleted meanwhile is omitted.
    """
    from gpuprobe.recording.running import running

    return running()


def process_details(pid: int, ticks: int) -> ProcessDetails:
    """The arguments, folder and environment of the process that started at ``ticks`` (clock ticks
    since boot; 0 for any process with this id), with secrets replaced by ``<secret>``: the values
    of variables such as ``HF_TOKEN`` and ``WANDB_API_KEY`` wherever they appear, tokens of known
    forms, and values of options such as ``--password``.
    """
    from dataclasses import replace

    from gpuprobe.model.values import Unavailable
    from gpuprobe.probes.host import process_details as read
    from gpuprobe.reporters.support_bundle import Redactor

    found = read(pid, ticks)
    variables = () if isinstance(found.environment, Unavailable) else found.environment
    redactor = Redactor(dict(variables))
    if not isinstance(found.environment, Unavailable):
        found = replace(found, environment=redactor.environment(variables))
    if not isinstance(found.arguments, Unavailable):
        found = replace(found, arguments=redactor.arguments(found.arguments))
    return found


def errors_of(inventory: Inventory) -> list[str]:
    """The values that could not be read, in a sentence per device, status and reason."""
    lines = error_lines(inventory, device_names(inventory))
    return [line.strip().removeprefix("! ") for line in lines]
