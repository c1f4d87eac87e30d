"""The highest points of a recording's memory: overall, in each phase, in each kind of step.

A recording's phase windows have a peak only between bounds, because the allocator has one
counter for the whole process (see ``docs/explanation/phases-and-peaks.md``). Traces have it to
the byte, together with the blocks that were alive. So this reads the traces, and splits them into
*parts*:

``setup``       until the first module is called
``forward``     a module is called, and a backward pass frees what it saved
``evaluation``  a module is called, and no backward pass frees anything of it (``no_grad``)
``backward``    inside the autograd engine
``optimizer``   inside ``Optimizer.step``
``data``        inside a data loader

Whether a call of the model is ``forward`` or ``evaluation`` depends on the line that calls it, over
all steps: if a backward pass frees its activations in one step, it is ``forward`` in all.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from gpuprobe.analysis.peak.peaks import PeakSite
from gpuprobe.analysis.trace.categories import Marks, Runs
from gpuprobe.analysis.trace.ledger import Ledger, ledger_of
from gpuprobe.model.run.session import Step
from gpuprobe.model.trace import Frame, MemoryTrace, StackTable
from gpuprobe.user_frames import is_user_frame

FIRST, LATER, AFTER = "first", "later", "after the last"
"""The kinds of step. The first allocates the optimizer's state; what follows the last full step (an
evaluation at the end) is not a separate step."""


@dataclass(slots=True)
class TracePart:
    """A stretch of one trace, events ``[first, end)``. After ``event``, ``peak`` bytes were
    allocated. ``site``: the line that called the model.
    """

    trace: int
    kind: str
    site: Frame | None
    first: int
    end: int = 0
    peak: int = -1
    event: int = -1
    saved: bool = False  # some of it was freed in a backward pass


@dataclass(frozen=True, slots=True)
class TracePoint:
    """An instant: after ``event`` of trace number ``trace``, with ``bytes`` allocated."""

    trace: int
    event: int
    bytes: int


@dataclass(slots=True)
class Traced:
    """The traces of one device, step by step, and their highest points. ``steps[i]`` is the step
    of trace number i, ``parts[i]`` its parts.
    """

    site: PeakSite
    steps: list[Step] = field(default_factory=list)
    names: list[int] = field(default_factory=list)  # the number of the trace within its step
    parts: list[list[TracePart]] = field(default_factory=list)
    ends: list[TracePoint] = field(default_factory=list)  # the last instant of each trace
    complete: bool = True  # whether each step has a trace

    def trace(self, number: int) -> MemoryTrace:
        """One trace, read again."""
        traces = list(_device_traces(self.site, self.steps[number]))
        return traces[self.names[number]]

    def labels(self) -> list[list[str]]:
        """The phase of each part."""
        every = [part for parts in self.parts for part in parts]
        trained = {part.site for part in every if part.saved}
        return [[_label(part, trained) for part in parts] for parts in self.parts]

    def peak(self) -> TracePoint | None:
        """The highest point of all traces; of equal ones the first."""
        return _highest(part for parts in self.parts for part in parts)

    def phases(self) -> dict[str, TracePoint]:
        """The highest point of each phase."""
        groups: dict[str, list[TracePart]] = {}
        for names, parts in zip(self.labels(), self.parts, strict=True):
            for name, part in zip(names, parts, strict=True):
                groups.setdefault(name, []).append(part)
        found = ((name, _highest(parts)) for name, parts in groups.items())
        return {name: point for name, point in found if point is not None}

    def kinds_of_step(self) -> dict[str, TracePoint]:
        """The highest point of each kind of step."""
        groups: dict[str, list[TracePart]] = {}
        full = {step.index for step in full_steps(self.site.rank.steps)}
        first = min(full, default=-1)
        for step, parts in zip(self.steps, self.parts, strict=True):
            if step.index in full or step.ended_by == "end":
                kind = AFTER if step.ended_by == "end" else FIRST if step.index == first else LATER
                groups.setdefault(kind, []).extend(parts)
        found = ((name, _highest(parts)) for name, parts in groups.items())
        return {name: point for name, point in found if point is not None}


def full_steps(steps: Iterable[Step]) -> list[Step]:
    """The whole steps, without inference before training and without what follows the last
    step.
    """
    full = [step for step in steps if step.ended_by != "end"]
    trained = [step for step in full if step.ended_by != "inference"]
    return trained or full


def _label(part: TracePart, trained: set[Frame | None]) -> str:
    if part.kind != "forward":
        return part.kind
    return "forward" if part.site is None or part.site in trained else "evaluation"


def _highest(parts: Iterable[TracePart]) -> TracePoint | None:
    best = max(parts, key=lambda part: (part.peak, -part.trace, -part.event), default=None)
    return None if best is None else TracePoint(best.trace, best.event, best.peak)


def _device_traces(site: PeakSite, step: Step) -> Iterator[MemoryTrace]:
    return (trace for trace in site.rank.traces.of(step) if trace.device == site.device)


def traced(site: PeakSite) -> Traced:
    """Read all traces of the device of ``site``, each once.

    Raises DataError if a trace is missing or damaged.
    """
    found = Traced(site)
    for step in site.rank.steps:
        if site.rank.session.level != "trace":
            break
        number = -1
        for number, trace in enumerate(_device_traces(site, step)):
            ledger = ledger_of(trace)
            found.steps.append(step)
            found.names.append(number)
            index = len(found.parts)
            found.parts.append(_parts(ledger, index))
            totals = ledger.allocated_after()
            found.ends.append(TracePoint(index, ledger.events - 1, totals[-1]))
        if number < 0 and step.ended_by != "end":
            found.complete = False
    found.complete = found.complete and bool(found.parts)
    return found


def _parts(ledger: Ledger, number: int) -> list[TracePart]:
    runs = Runs(ledger, Marks(ledger.trace.stacks))
    sites = _Sites(ledger.trace.stacks)
    parts: list[TracePart] = []
    for row in range(ledger.made):
        kind = runs.kind(runs.at(ledger.start[row])) or "forward"
        site = sites.of(ledger.stack[row]) if kind == "forward" else None
        now = parts[-1] if parts else None
        if number == 0 and kind == "forward" and site is None and (not now or now.kind == "setup"):
            kind = "setup"
        if now is None or now.kind != kind or (site is not None and site != now.site):
            parts.append(TracePart(number, kind, site, ledger.start[row]))
    totals = ledger.allocated_after()
    for index, part in enumerate(parts):
        part.end = parts[index + 1].first if index + 1 < len(parts) else ledger.events
        span = totals[part.first + 1 : part.end + 1]
        part.peak = max(span)
        part.event = part.first + span.index(part.peak)
    if not parts:
        parts.append(TracePart(number, "forward", None, 0, ledger.events, max(totals)))
        parts[0].event = ledger.peak()
    at = 0
    for row in range(ledger.made):
        while at + 1 < len(parts) and parts[at + 1].first <= ledger.start[row]:
            at += 1
        freed = ledger.freed[row]
        if not parts[at].saved and freed < ledger.events:
            parts[at].saved = runs.kind(runs.at(freed)) == "backward"
    return parts


class _Sites:
    """The line that calls the outermost module, by stack id; each stack is searched once."""

    def __init__(self, stacks: StackTable) -> None:
        self._stacks = stacks
        self._found: dict[int, Frame | None] = {}

    def of(self, stack: int) -> Frame | None:
        if stack not in self._found:
            frames = self._stacks.frames_of(stack)
            outermost = max(
                (i for i, frame in enumerate(frames) if _is_module_call(frame)), default=None
            )
            found = None
            if outermost is not None:
                rest = frames[outermost + 1 :]
                found = next((f for f in rest if is_user_frame(f)), None)
            self._found[stack] = found
        return self._found[stack]


def _is_module_call(frame: Frame) -> bool:
    name = frame.filename.replace("\\", "/")
    return frame.name in ("_call_impl", "_wrapped_call_impl") and name.endswith(
        "torch/nn/modules/module.py"
    )
