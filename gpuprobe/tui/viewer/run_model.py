"""A recording as the screen shows it: plain immutable data. Independent of Textual."""

from __future__ import annotations

import re
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import overload

from gpuprobe.analysis.completeness import missing_of
from gpuprobe.analysis.inspection.steps import StepPeak
from gpuprobe.api.live import groups_of, is_running
from gpuprobe.model.memory import Category
from gpuprobe.model.needs import Need
from gpuprobe.model.run.recording import RankRecording, Recording
from gpuprobe.model.run.session import DeviceWindow, Step
from gpuprobe.model.text import human_bytes, human_ns, visible
from gpuprobe.model.values import Peak, Unavailable
from gpuprobe.tui.widgets.palette import chip, words
from gpuprobe.tui.widgets.styled_text import Line, bar

_MODULE = re.compile(r"[^\s:/()]+\.[^\s:/()]+")
_BAR = 10
_LINE = 30


@dataclass(frozen=True, slots=True)
class StepLine:
    """One line of the table of steps. ``height``: the value of the plot, in bytes."""

    index: int
    step: Step
    time: str
    peak: str
    reserved: str
    end: str
    phase: str
    note: str
    height: int


class StepLines(Sequence[StepLine]):
    """The lines of the table of steps. Each is made when it is shown: there may be a million."""

    def __init__(self, steps: Sequence[Step], device: str) -> None:
        self._steps = steps
        self._device = device

    def __len__(self) -> int:
        return len(self._steps)

    @overload
    def __getitem__(self, index: int) -> StepLine: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[StepLine]: ...
    def __getitem__(self, index: int | slice) -> StepLine | Sequence[StepLine]:
        if isinstance(index, slice):
            return StepLines(self._steps[index], self._device)
        return _row(self._steps[index], self._device)


class Curves:
    """The curves of the plot of one rank's steps, kept between reads: only new steps, and the last
    one, which can change, are read again.
    """

    def __init__(self) -> None:
        self._clear()

    def _clear(self) -> None:
        self.device = ""
        self.allocated = array("q")
        self.reserved = array("q")
        self.time = array("q")
        self._best = -1
        self._last: Step | None = None  # the last but one

    def update(self, steps: Sequence[Step]) -> None:
        """Add new steps. If earlier steps have been replaced, start again."""
        known = len(self.time)
        if known > len(steps) or (known > 1 and steps[known - 2] is not self._last):
            self._clear()
            known = 0
        new = steps[max(0, known - 1) :]
        if self._device_of(new):
            known, new = 0, steps
        keep = max(0, known - 1)
        for column in (self.allocated, self.reserved, self.time):
            del column[keep:]
        for step in new:
            window = _window(step.windows, self.device)
            self.allocated.append(_level(window.peak_allocated if window else step.host.rss_peak))
            self.reserved.append(_level(window.peak_reserved) if window else 0)
            self.time.append(step.duration_ns)
        self._last = steps[-2] if len(steps) > 1 else None

    def _device_of(self, steps: Sequence[Step]) -> bool:
        """Whether the device with the highest peak has changed."""
        before = self.device
        for step in steps:
            for window in step.windows:
                level = _level(window.peak_allocated, -1)
                if level > self._best:
                    self._best, self.device = level, window.device
        return self.device != before


def _level(peak: Peak | Unavailable, default: int = 0) -> int:
    return peak.at_least if isinstance(peak, Peak) else default


@dataclass(frozen=True, slots=True)
class RunModel:
    """One rank of a recording, formatted for the screen. ``curves`` belongs to the caller."""

    title: str
    state: str
    facts: str
    measure: str
    rows: Sequence[StepLine]
    running: bool
    rank: int
    ranks: int
    device: str
    cwd: str = ""
    blind_spots: tuple[str, ...] = ()
    curves: Curves = field(default_factory=Curves, compare=False)

    @property
    def highest(self) -> int:
        """The row with the highest peak; -1 without steps."""
        heights = self.curves.allocated[: len(self.rows)]
        return heights.index(max(heights)) if heights else -1


def model_of(recording: Recording, rank: int = 0, curves: Curves | None = None) -> RunModel:
    """The model of the rank at position ``rank``, clamped to the existing ones.

    ``curves``: those of the last read of this rank, if any.
    """
    name = visible(PurePath(recording.path).name)
    if not recording.ranks:
        return RunModel(name, "no rank has started", "", "", (), True, 0, 0, "")
    rank = max(0, min(rank, len(recording.ranks) - 1))
    chosen = recording.ranks[rank]
    curves = curves or Curves()
    curves.update(chosen.steps)
    device = curves.device
    session, environment = chosen.session, chosen.environment
    torch = environment.torch
    recorded = recording.kind == "recording"
    facts = [", ".join(session.devices) or "no device"]
    if recorded:
        facts.insert(0, f"torch {torch}" if isinstance(torch, str) else "torch unknown")
        facts.append(f"level {session.level}")
    elif not device:  # it has no steps
        device = ", ".join(session.devices)
    if len(recording.ranks) > 1:
        facts.append(f"rank {session.rank} of {len(recording.ranks)}")
    return RunModel(
        title=name,
        state=_state(chosen) if recorded else "memory snapshot",
        facts=visible(" · ".join(facts)),
        measure=f"allocated on {device}" if device else "resident memory of the process",
        rows=StepLines(chosen.steps, device),
        running=recorded and is_running(chosen),
        rank=rank,
        ranks=len(recording.ranks),
        device=curves.device,
        cwd=session.cwd,
        blind_spots=tuple(
            visible(text)
            for text in (
                *(f"{s.what}: {s.consequence}" for s in chosen.blind_spots),
                *(missing_of(chosen, ended=True) if recorded and not is_running(chosen) else ()),
            )
        ),
        curves=curves,
    )


def _state(rank: RankRecording) -> str:
    if rank.end is None:
        return "running" if is_running(rank) else "no end"
    if rank.end.error is not None:
        return visible(f"failed: {rank.end.error.type}: {rank.end.error.message}")
    if missing := missing_of(rank):
        return visible(f"incomplete: {missing[0]}")
    return f"complete after {human_ns(rank.end.duration_ns)}"


def _window(windows: Sequence[DeviceWindow], device: str) -> DeviceWindow | None:
    return next((w for w in windows if w.device == device), None)


def _row(step: Step, device: str) -> StepLine:
    window = _window(step.windows, device)
    peak = window.peak_allocated if window else step.host.rss_peak
    end = window.end.allocated if window else step.host.rss_end
    return StepLine(
        index=step.index,
        step=step,
        time=human_ns(step.duration_ns),
        peak=_peak(peak),
        reserved=_peak(window.peak_reserved) if window else "-",
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
    """The top-level phase with the highest peak; the first of several."""
    best, name = -1, "-"
    for phase in step.phases:
        window = _window(phase.windows, device)
        peak = window.peak_allocated if window else phase.host.rss_peak
        if "/" not in phase.path and isinstance(peak, Peak) and peak.at_least > best:
            best, name = peak.at_least, phase.path
    return name


def detail_lines(
    model: RunModel, row: StepLine, peak: StepPeak | Unavailable | None, *, plain: bool = False
) -> list[Line]:
    """The panel next to the table: the phases, the tensors and the peak of one step.

    ``peak`` is None while it is being read. All bars of a step have the same scale. ``plain``:
    letters instead of colours.
    """
    step = row.step
    whole = _whole(row, peak)
    texts: list[str | Line] = [f"Step {row.index} · {row.time}", ""]
    texts.append("Phase                 time        peak")
    for phase in step.phases:
        window = _window(phase.windows, model.device)
        amount = _peak(window.peak_allocated if window else phase.host.rss_peak)
        depth = phase.path.count("/")
        name = visible("  " * depth + phase.name)
        texts.append(f"{name:<16.16} {human_ns(phase.duration_ns):>10} {amount:>11}")
    for tensors in step.tensors:
        texts += ["", f"At the end, on {visible(tensors.device)}"]
        named = sorted(tensors.by_category.items(), key=lambda item: -item[1])
        texts += [_bar(category, size, whole, plain) for category, size in named if size]
        if isinstance(tensors.rest, int):
            texts.append(_bar(None, tensors.rest, whole, plain))
    texts += ["", "At the peak"]
    if peak is None:
        texts.append("reading the trace …")
    elif isinstance(peak, Unavailable):
        texts.append(visible(peak.reason))
    else:
        where = f", in {visible(peak.phase)}" if peak.phase else ""
        texts.append(f"{human_bytes(peak.allocated)} on {peak.device}{where}")
        shares = [share for share in peak.categories if share.bytes]
        texts += [_bar(Category(share.key), share.bytes, whole, plain) for share in shares]
        if peak.needs:
            texts += ["", "What it is needed for"]
            texts += [_bar(Need(share.key), share.bytes, whole, plain) for share in peak.needs]
        for title, by, shown in (
            ("Lines", "line", peak.lines),
            ("Modules", "module", peak.modules),
        ):
            texts += ["", title]
            for group in groups_of(shown, by)[:8]:
                times = f" ×{len(group.members)}" if len(group.members) > 1 else ""
                name = short_line(group.name, model.cwd, _LINE - len(times))
                texts.append(f"{human_bytes(group.sum.bytes):>10}  {name}{times}")
    return [((text, ""),) if isinstance(text, str) else text for text in texts]


def _whole(row: StepLine, peak: StepPeak | Unavailable | None) -> int:
    """The value of a full bar: the largest amount in the panel, in bytes."""
    sizes = [0 if peak is None or isinstance(peak, Unavailable) else peak.allocated]
    for tensors in row.step.tensors:
        rest = tensors.rest if isinstance(tensors.rest, int) else 0
        sizes.append(sum(tensors.by_category.values()) + rest)
    return max(1, *sizes)


def _bar(given: Category | Need | None, size: int, whole: int, plain: bool) -> Line:
    """A category (None: everything without one) or a need, its size, and its share of ``whole``."""
    kind = Category.OTHER if given is None else given
    name = "everything else" if given is None else words(given)
    drawn = bar(size / whole, _BAR, "" if plain else kind.value)
    return ((f"{human_bytes(size):>10}  ", ""), chip(kind, plain), (f" {name:<18.18} ", ""), *drawn)


def short_line(key: str, cwd: str, columns: int = 0) -> str:
    """A line or module relative to the working directory; if that has more than ``columns``
    characters (0: no limit), without directories, then cut: a line at its end, a module at its
    beginning.
    """
    text = visible(key.removeprefix(cwd.rstrip("/") + "/") if cwd else key)
    place, found, function = text.partition(" in ")
    parts = place.split("/")
    if len(parts) > 3 and not parts[0]:  # not below the working directory
        text = f"…/{parts[-2]}/{parts[-1]}{found}{function}"
    if not columns or len(text) <= columns:
        return text
    if len(parts) > 1:
        text = parts[-1] + found + function
    if len(text) <= columns:
        return text
    if _MODULE.fullmatch(text):
        return "…" + text[len(text) - columns + 1 :]
    return text[: max(0, columns - 1)] + "…"
