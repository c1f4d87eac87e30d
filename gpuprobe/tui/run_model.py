"""What the screen shows of a recording, as plain immutable data. Knows nothing of Textual."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePath

from gpuprobe.api.live import StepPeak, is_running
from gpuprobe.model.memory import Category
from gpuprobe.model.recording import RankRecording, Recording
from gpuprobe.model.session import DeviceWindow, Step
from gpuprobe.model.text import human_bytes, human_ns, visible
from gpuprobe.model.values import Peak, Unavailable

__all__ = ["RunModel", "StepRow", "detail_lines", "model_of"]

_BAR = 10


@dataclass(frozen=True, slots=True)
class StepRow:
    """One line of the table. ``height`` is what the plot shows, in bytes."""

    index: int
    step: Step
    time: str
    peak: str
    end: str
    phase: str
    note: str
    height: int


@dataclass(frozen=True, slots=True)
class RunModel:
    """One rank of a recording, ready to be shown."""

    title: str
    state: str
    facts: str
    measure: str
    rows: tuple[StepRow, ...]
    running: bool
    rank: int
    ranks: int
    device: str
    cwd: str = ""
    blind_spots: tuple[str, ...] = ()

    @property
    def highest(self) -> int:
        """The row with the peak; -1 where there is none."""
        if not self.rows:
            return -1
        return max(range(len(self.rows)), key=lambda i: self.rows[i].height)


def model_of(recording: Recording, rank: int = 0) -> RunModel:
    """What to show of the rank at position ``rank`` (it is clamped to those there are)."""
    name = visible(PurePath(recording.path).name)
    if not recording.ranks:
        return RunModel(name, "no rank has begun", "", "", (), True, 0, 0, "")
    rank = max(0, min(rank, len(recording.ranks) - 1))
    chosen = recording.ranks[rank]
    device = _device(chosen)
    session, environment = chosen.session, chosen.environment
    torch = environment.torch
    facts = [
        f"torch {torch}" if isinstance(torch, str) else "torch unknown",
        ", ".join(session.devices) or "no device",
        f"level {session.level}" if recording.kind == "recording" else "snapshot",
    ]
    if len(recording.ranks) > 1:
        facts.append(f"rank {session.rank} of {len(recording.ranks)}")
    return RunModel(
        title=name,
        state=_state(chosen),
        facts=visible(" · ".join(facts)),
        measure=f"allocated on {device}" if device else "resident memory of the process",
        rows=tuple(_row(step, device) for step in chosen.steps),
        running=is_running(chosen),
        rank=rank,
        ranks=len(recording.ranks),
        device=device,
        cwd=session.cwd,
        blind_spots=tuple(visible(f"{s.what}: {s.consequence}") for s in chosen.blind_spots),
    )


def _state(rank: RankRecording) -> str:
    if rank.end is None:
        return "running" if is_running(rank) else "killed, or its end was not written"
    if rank.end.error is not None:
        return visible(f"failed: {rank.end.error.type}: {rank.end.error.message}")
    return f"complete after {human_ns(rank.end.duration_ns)}"


def _device(rank: RankRecording) -> str:
    """The device with the highest peak; "" where none is measured."""
    best, name = -1, ""
    for step in rank.steps:
        for window in step.windows:
            if isinstance(window.peak_allocated, Peak) and window.peak_allocated.at_least > best:
                best, name = window.peak_allocated.at_least, window.device
    return name


def _window(windows: Sequence[DeviceWindow], device: str) -> DeviceWindow | None:
    return next((w for w in windows if w.device == device), None)


def _row(step: Step, device: str) -> StepRow:
    window = _window(step.windows, device)
    peak = window.peak_allocated if window else step.host.rss_peak
    end = window.end.allocated if window else step.host.rss_end
    return StepRow(
        index=step.index,
        step=step,
        time=human_ns(step.duration_ns),
        peak=_peak(peak),
        end=human_bytes(end) if isinstance(end, int) else "-",
        phase=visible(_phase(step, device)),
        note=("after the last step" if step.ended_by == "end" else "")
        or ("traced" if step.traces else ""),
        height=peak.at_least if isinstance(peak, Peak) else 0,
    )


def _peak(peak: Peak | Unavailable) -> str:
    if isinstance(peak, Unavailable):
        return "-"
    return ("" if peak.exact else "≥") + human_bytes(peak.at_least)


def _phase(step: Step, device: str) -> str:
    """The phase of depth one with the highest peak; of equals, the first."""
    best, name = -1, "-"
    for phase in step.phases:
        window = _window(phase.windows, device)
        peak = window.peak_allocated if window else phase.host.rss_peak
        if "/" not in phase.path and isinstance(peak, Peak) and peak.at_least > best:
            best, name = peak.at_least, phase.path
    return name


def detail_lines(model: RunModel, row: StepRow, peak: StepPeak | Unavailable | None) -> list[str]:
    """The panel beside the table: the phases, the tensors and the peak of one step.

    ``peak`` is None while it is still being looked up.
    """
    step = row.step
    lines = [f"Step {row.index} · {row.time}", ""]
    lines.append("Phase                 time        peak")
    for phase in step.phases:
        window = _window(phase.windows, model.device)
        amount = _peak(window.peak_allocated if window else phase.host.rss_peak)
        depth = phase.path.count("/")
        name = visible("  " * depth + phase.name)
        lines.append(f"{name:<16.16} {human_ns(phase.duration_ns):>10} {amount:>11}")
    for tensors in step.tensors:
        lines += ["", f"At the end, on {visible(tensors.device)}"]
        named = sorted(tensors.by_category.items(), key=lambda item: -item[1])
        rows = [(_words(category), size) for category, size in named]
        if isinstance(tensors.rest, int):
            rows.append(("everything else", tensors.rest))
        lines += _bars(rows)
    lines += ["", "At the peak"]
    if peak is None:
        lines.append("reading the trace …")
    elif isinstance(peak, Unavailable):
        lines.append(visible(peak.reason))
    else:
        lines.append(f"{human_bytes(peak.allocated)} on {peak.device}, in {visible(peak.phase)}")
        lines += _bars([(share.key, share.bytes) for share in peak.categories if share.bytes])
        for title, shares in (("Lines", peak.lines), ("Modules", peak.modules)):
            lines += ["", title]
            lines += [f"{human_bytes(s.bytes):>10}  {_short(s.key, model.cwd)}" for s in shares[:8]]
    return lines


def _short(key: str, cwd: str) -> str:
    """A line or module, without the working directory in front of it."""
    return visible(key.removeprefix(cwd.rstrip("/") + "/") if cwd else key)


def _words(category: Category) -> str:
    return category.value.replace("_", " ")


def _bars(rows: Sequence[tuple[str, int]]) -> list[str]:
    whole = max(1, sum(size for _, size in rows))
    return [
        f"{human_bytes(size):>10}  {name.replace('_', ' '):<16.16} {_bar(size / whole)}"
        for name, size in rows
    ]


def _bar(share: float) -> str:
    return "█" * round(share * _BAR)
