"""Recordings on a screen: followed while they are written, looked into step by step."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from gpuprobe.errors import DataError
from gpuprobe.model.values import ReadStatus, Unavailable

if TYPE_CHECKING:
    from gpuprobe.analysis.growth.forecast import Forecast
    from gpuprobe.analysis.growth.leaks import Leaks
    from gpuprobe.analysis.peak.high_water import Share
    from gpuprobe.analysis.reserved.fragmentation import Fragmentation
    from gpuprobe.model.machine.devices import GpuProcess, Inventory
    from gpuprobe.model.run.recording import RankRecording, Recording
    from gpuprobe.model.run.session import Step

__all__ = [
    "Followed",
    "Insight",
    "Neighbours",
    "StepPeak",
    "insight",
    "is_running",
    "neighbours",
    "out_of_memory",
    "step_peak",
]

MOST_TRACES = 12
"""Traced steps that are searched for leaks, the newest and the first: each costs a read."""


class Followed:
    """A recording or a snapshot that is open on a screen.

    `poll` reads what is new of a recording, and a snapshot once, at the first call: that of a
    million events takes seconds. Raises UsageError where there is no such path, NotARecording
    where it can be neither; `poll` what `gpuprobe.load` raises.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        from gpuprobe.api.recordings import _refuse_stream, load
        from gpuprobe.recording.reader import RecordingTail

        self.path = Path(path)
        self._tail = RecordingTail(self.path) if self.path.is_dir() else None
        self._whole: Recording | None = None
        if self._tail is None:
            if self.path.is_file():
                _refuse_stream(self.path)
            else:
                self._whole = load(self.path)  # raises, and says why

    def poll(self) -> Recording:
        """What is on disk now."""
        if self._tail is not None:
            return self._tail.poll()
        if self._whole is None:
            from gpuprobe.api.recordings import load

            self._whole = load(self.path)
        return self._whole

    @property
    def cheap(self) -> bool:
        """Whether the first `poll` is over soon: so it is for all but snapshots."""
        return self._tail is not None


def is_running(rank: RankRecording) -> bool:
    """Whether the process that writes this rank may still be writing."""
    from gpuprobe.api.recordings import _is_running

    return rank.end is None and _is_running(rank) is not False


@dataclass(frozen=True, slots=True)
class StepPeak:
    """What was alive at the peak of one step on one device. Sums to ``allocated`` bytes."""

    device: str
    allocated: int
    phase: str
    categories: tuple[Share, ...]
    lines: tuple[Share, ...]
    modules: tuple[Share, ...]


def step_peak(rank: RankRecording, step: Step) -> StepPeak | Unavailable:
    """The highest of the step's traces, looked at; `Unavailable` where it has none."""
    from gpuprobe.analysis.peak.high_water import by_category, by_line, by_module, high_water

    try:
        marks = [high_water(trace) for trace in rank.traces_of(step)]
    except DataError as error:
        return Unavailable(str(error))
    if not marks:
        reason = (
            "this step has no trace: the first steps and those with a new peak have one"
            if rank.session.level == "trace"
            else "needs a recording at level 'trace'"
        )
        return Unavailable(reason, ReadStatus.NOT_COLLECTED)
    mark = max(marks, key=lambda m: m.allocated)
    return StepPeak(
        mark.device, mark.allocated, mark.phase, by_category(mark), by_line(mark), by_module(mark)
    )


@dataclass(frozen=True, slots=True)
class Insight:
    """What only traces tell: how the memory was cut up at the end of ``step`` (the newest traced
    one; None for a snapshot), and which lines leave memory behind.
    """

    step: int | None
    fragmentation: Fragmentation | Unavailable
    leaks: Leaks | Unavailable


def insight(rank: RankRecording, device: str) -> Insight:
    """Look into the traces of one device, of `MOST_TRACES` steps at most. Reads them now."""
    from gpuprobe.analysis.growth.leaks import leaks, leaks_over_steps
    from gpuprobe.analysis.reserved.fragmentation import fragmentation

    traced = [step for step in rank.steps if step.traces]
    if len(traced) > MOST_TRACES:
        half = MOST_TRACES // 2
        traced = traced[:half] + traced[-half:]
    try:
        if not rank.steps:
            traces = [trace for trace in rank.load_traces() if device in ("", trace.device)]
        else:
            traces = [
                trace for s in traced for trace in rank.traces_of(s) if trace.device == device
            ]
    except DataError as error:
        failed = Unavailable(str(error))
        return Insight(None, failed, failed)
    if not traces:
        why = "no step has a trace yet" if rank.session.level == "trace" else "needs level 'trace'"
        nothing = Unavailable(why, ReadStatus.NOT_COLLECTED)
        return Insight(None, nothing, nothing)
    last = traces[-1]
    found = leaks_over_steps(traces) if rank.steps else leaks(last)
    return Insight(last.step, fragmentation(last), found)


@dataclass(frozen=True, slots=True)
class Neighbours:
    """The GPU that a running process uses, as the driver sees it now. Bytes.

    ``held`` is what the process holds in all: what torch reserved, and what it did not (the CUDA
    context, libraries). ``others`` is what ``other_processes`` hold beside it.
    """

    gpu: str
    total: int | Unavailable
    free: int | Unavailable
    held: int | Unavailable
    others: int | Unavailable
    other_processes: int


def neighbours(
    rank: RankRecording, device: str, demo: str | None = None
) -> Neighbours | Unavailable:
    """Ask NVML who shares the GPU that ``device`` (``cuda:N``) of a running process is.

    No CUDA context is created. `Unavailable` where the process does not run on this machine, or
    cannot be told apart on its GPUs. ``demo`` names a fake fleet to ask instead.
    """
    from gpuprobe.api.devices import inventory

    if not device.startswith("cuda"):
        return Unavailable("the memory is not a GPU's", ReadStatus.UNSUPPORTED)
    if not is_running(rank):
        return Unavailable("the program does not run any more", ReadStatus.NOT_COLLECTED)
    environment = rank.environment
    visible = environment.cuda_visible_devices
    environ = {} if isinstance(visible, Unavailable) else {"CUDA_VISIBLE_DEVICES": visible}
    found = inventory(("nvml",), demo, detail="table", environ=environ)
    if not any(source.available for source in found.sources):
        reasons = "; ".join(source.reason for source in found.sources)
        return Unavailable(f"NVML cannot be asked: {reasons}")
    return _among(found, rank.session.pid, device)


def _among(found: Inventory, pid: int, device: str) -> Neighbours | Unavailable:
    mine = [process for process in found.processes if process.pid == pid and not process.hidden]
    keys = {process.device for process in mine}
    ordinal = device.partition(":")[2]
    gpus = [gpu for gpu in found.devices if gpu.key in keys]
    if len(gpus) > 1:  # which of them is cuda:N, the driver's order tells
        gpus = [gpu for gpu in gpus if str(gpu.identity.cuda_ordinal) == ordinal]
    if len(gpus) != 1:
        why = "holds memory on none" if not keys else f"holds memory on {len(keys)}"
        return Unavailable(f"by NVML, process {pid} {why} of the {len(found.devices)} GPUs")
    gpu = gpus[0]
    here = [process for process in found.processes if process.device == gpu.key]
    others = [process for process in here if process.pid != pid or process.hidden]
    name = gpu.name.value
    total, free = gpu.memory.total.value, gpu.memory.free.value
    return Neighbours(
        gpu=name if isinstance(name, str) else gpu.key,
        total=total,
        free=free,
        held=_held([process for process in here if process not in others]),
        others=_held(others),
        other_processes=len(others),
    )


def _held(processes: list[GpuProcess]) -> int | Unavailable:
    total = 0
    for process in processes:
        memory = process.memory.value
        if isinstance(memory, Unavailable):
            return memory
        total += memory
    return total


def out_of_memory(
    rank: RankRecording, device: str, around: Neighbours | Unavailable
) -> Forecast | Unavailable:
    """When the device (for an empty ``device``, or the CPU: this machine) runs out of memory.

    torch can hold what it has reserved and what the driver has free; a process on the CPU what
    it holds and what the system has available. `Unavailable` where there is no growth.
    """
    from gpuprobe.analysis.growth.forecast import forecast_of_steps

    return forecast_of_steps(rank.steps, device, _limit(rank, device, around))


def _limit(rank: RankRecording, device: str, around: Neighbours | Unavailable) -> int | Unavailable:
    from gpuprobe.analysis.peak.peaks import window_of

    last = rank.steps[-1] if rank.steps else None
    if last is None:
        return Unavailable("there is no step yet", ReadStatus.NOT_COLLECTED)
    window = window_of(last.windows, device) if device else None
    if device.startswith("cuda"):
        if isinstance(around, Unavailable):
            return around
        if isinstance(around.free, Unavailable):
            return around.free
        reserved = window.end.reserved if window else Unavailable("no window")
        return reserved if isinstance(reserved, Unavailable) else reserved + around.free
    if not is_running(rank):
        return Unavailable("the program does not run any more", ReadStatus.NOT_COLLECTED)
    import psutil

    level = window.end.allocated if window else last.host.rss_end
    if isinstance(level, Unavailable):
        return level
    return level + int(psutil.virtual_memory().available)
