"""Recordings for screens: followed while they are written, inspected step by step."""

from __future__ import annotations

from collections.abc import Sequence

from gpuprobe.analysis.growth import Forecast, forecast_of_steps
from gpuprobe.analysis.inspection.steps import (
    RankFacts,
    rank_facts,
)
from gpuprobe.analysis.peak.peaks import Share, window_of
from gpuprobe.analysis.repeats import RepeatedShare, share_groups
from gpuprobe.api.devices import inventory
from gpuprobe.model.machine.process import Neighbours
from gpuprobe.model.report import ShareRow
from gpuprobe.model.run.recording import RankRecording, Recording
from gpuprobe.model.values import ReadStatus, Unavailable
from gpuprobe.probes.memory import neighbours_of
from gpuprobe.recording.running import is_alive
from gpuprobe.reporters.sections.watch import ranks_section
from gpuprobe.reporters.terminal import Style
from gpuprobe.reporters.text.draw import draw


def is_running(rank: RankRecording) -> bool:
    """Whether the process that writes this rank may still be writing."""
    return rank.end is None and is_alive(rank) is not False


def facts_of_ranks(recording: Recording) -> list[RankFacts]:
    """A few figures of each rank."""
    return [rank_facts(rank, running=is_running(rank)) for rank in recording.ranks]


def groups_of(shares: Sequence[Share[str]], by: str) -> list[RepeatedShare]:
    """All parts of a peak by line or by module, those that repeat as one; the most bytes first."""
    return share_groups([ShareRow(one.key, one.bytes, one.blocks) for one in shares], by)


def rank_lines(recording: Recording, columns: int) -> list[str]:
    """A table of the ranks as text: a heading, then one line per rank."""
    section = ranks_section(facts_of_ranks(recording))
    return [line.text for line in draw([section], Style(width=columns))]


def neighbours(
    rank: RankRecording, device: str, demo: str | None = None
) -> Neighbours | Unavailable:
    """The processes that share the GPU ``device`` (``cuda:N``) of a running process, from NVML.

    No CUDA context is created. `Unavailable` if the process does not run on this machine, or
    cannot be identified on its GPUs. ``demo`` names a simulated fleet to query instead.
    """
    if not device.startswith("cuda"):
        return Unavailable("this is not GPU memory", ReadStatus.UNSUPPORTED)
    if not is_running(rank):
        return Unavailable("the program has ended", ReadStatus.NOT_COLLECTED)
    environment = rank.environment
    visible = environment.cuda_visible_devices
    environ = {} if isinstance(visible, Unavailable) else {"CUDA_VISIBLE_DEVICES": visible}
    found = inventory(("nvml",), demo, detail="table", environ=environ)
    if not any(source.available for source in found.sources):
        reasons = "; ".join(source.reason for source in found.sources)
        return Unavailable(f"NVML is unavailable: {reasons}")
    return neighbours_of(rank.session.pid, device, found)


def out_of_memory(
    rank: RankRecording, device: str, around: Neighbours | Unavailable
) -> Forecast | Unavailable:
    """Forecast of when the device (for an empty ``device``, or the CPU: this machine) runs out of
    memory.

    The limit is the memory that torch has reserved and the driver has free; for a process on the
    CPU, its own memory and the system's available memory. `Unavailable` without growth.
    """
    return forecast_of_steps(rank.steps, device, _limit(rank, device, around))


def _limit(rank: RankRecording, device: str, around: Neighbours | Unavailable) -> int | Unavailable:
    last = rank.steps[-1] if rank.steps else None
    if last is None:
        return Unavailable("no step yet", ReadStatus.NOT_COLLECTED)
    window = window_of(last.windows, device) if device else None
    if device.startswith("cuda"):
        if isinstance(around, Unavailable):
            return around
        if isinstance(around.free, Unavailable):
            return around.free
        reserved = window.end.reserved if window else Unavailable("no window")
        return reserved if isinstance(reserved, Unavailable) else reserved + around.free
    if not is_running(rank):
        return Unavailable("the program has ended", ReadStatus.NOT_COLLECTED)
    import psutil  # 15 ms, and only for a process on the CPU

    level = window.end.allocated if window else last.host.rss_end
    if isinstance(level, Unavailable):
        return level
    return level + int(psutil.virtual_memory().available)
