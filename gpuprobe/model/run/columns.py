"""The figures of a rank's steps that are compared with those of other ranks, in columns.

A step as objects takes 10 KB and 0.1 ms to make; in a job of a thousand ranks there are a million.
A report shows a few of them, and needs some twenty numbers of each of the others.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

from gpuprobe.model.run.session import Step
from gpuprobe.model.values import Peak, Unavailable

MISSING: Final = -(1 << 63)
"""In a column: not recorded. No figure of a step is this low."""

_MOST: Final = 1 << 62

Key = tuple[str, str]
"""Name of a column, and its phase or device ("" for the step)."""

INDEX: Final[Key] = ("index", "")
DURATION: Final[Key] = ("duration_ns", "")
WAITED: Final[Key] = ("waited_ns", "")

FULL: Final[Key] = ("full", "")
PLACED: Final[Key] = ("placed", "")
TRACED: Final[Key] = ("traced", "")
PINNED: Final[Key] = ("pinned", "")


def figures(step: Step) -> dict[Key, tuple[int, ...]]:
    """The numbers of a step, each as the terms of a sum: times in nanoseconds, memory in bytes.

    * ``phase`` of each phase of depth one: its duration, and ``phase_waited``: how long of it was
      spent waiting for other ranks, and ``phase_copied`` moving tensors to a device, where known;
    * ``end_allocated`` of each device: memory at the end of the step;
    * ``waited_ns``: how long collectives blocked the thread that called them, where known;
    * ``allocated_least``, ``allocated_most``, ``reserved_least`` and ``reserved_most`` of each
      device, and ``resident_least`` and ``resident_most`` of the process: peaks.
    """
    found: dict[Key, tuple[int, ...]] = {
        INDEX: (step.index,),
        DURATION: (step.duration_ns,),
        WAITED: tuple(
            call.host_ns for call in step.collectives if not isinstance(call.host_ns, Unavailable)
        ),
    }
    for phase in step.phases:
        if "/" not in phase.path:
            key = ("phase", phase.path)
            found[key] = (*found.get(key, ()), phase.duration_ns)
            if not isinstance(phase.waited_ns, Unavailable):
                waits = ("phase_waited", phase.path)
                found[waits] = (*found.get(waits, ()), phase.waited_ns)
            if not isinstance(phase.copied_ns, Unavailable):
                copies = ("phase_copied", phase.path)
                found[copies] = (*found.get(copies, ()), phase.copied_ns)
    _add_peak(found, "resident", "", step.host.rss_peak)
    for window in reversed(step.windows):  # of several of one device the first counts
        _add_peak(found, "allocated", window.device, window.peak_allocated)
        _add_peak(found, "reserved", window.device, window.peak_reserved)
        found.pop(("end_allocated", window.device), None)
        if not isinstance(window.end.allocated, Unavailable):
            found["end_allocated", window.device] = (window.end.allocated,)
    return found


def _add_peak(
    found: dict[Key, tuple[int, ...]], name: str, device: str, peak: Peak | Unavailable
) -> None:
    least, most = (f"{name}_least", device), (f"{name}_most", device)
    if isinstance(peak, Unavailable):
        found.pop(least, None)
        found.pop(most, None)
    else:
        found[least], found[most] = (peak.at_least,), (peak.at_most,)


def marks(step: Step) -> tuple[Key, ...]:
    """What a step has: ``full`` (it did not end with the session), ``placed``, ``traced``,
    ``pinned`` (that memory is known), and for each device ``window``, ``used`` and ``split`` (see
    `DeviceWindow`). In order, each once.
    """
    found: list[Key] = []
    if step.ended_by != "end":
        found.append(FULL)
    if step.placement:
        found.append(PLACED)
    if step.traces:
        found.append(TRACED)
    if not isinstance(step.host.pinned, Unavailable):
        found.append(PINNED)
    for window in step.windows:
        found.append(("window", window.device))
        if not isinstance(window.device_used, Unavailable):
            found.append(("used", window.device))
        if not isinstance(window.inactive_split, Unavailable):
            found.append(("split", window.device))
    return tuple(dict.fromkeys(found))


class StepColumns:
    """A row for each step, in the order of their index."""

    __slots__ = ("_marks", "_numbers", "rows")

    def __init__(
        self,
        numbers: Mapping[Key, array[int]] | None = None,
        marks: Mapping[Key, bytearray] | None = None,
        rows: int = 0,
    ) -> None:
        self._numbers: dict[Key, array[int]] = dict(numbers or {})
        self._marks: dict[Key, bytearray] = dict(marks or {})
        self.rows = rows

    @classmethod
    def of(cls, steps: Iterable[Step]) -> StepColumns:
        """The columns of steps that are in memory."""
        made = cls()
        for step in steps:
            made.append(step)
        return made

    def append(self, step: Step) -> None:
        """Add a step's row."""
        # A sum of many numbers, each within its bounds, may be more than a column can hold.
        numbers = {
            key: (max(-_MOST, min(sum(terms), _MOST)),) for key, terms in figures(step).items()
        }
        self.extend(numbers, marks(step), 1)

    def extend(self, numbers: Mapping[Key, Iterable[int]], has: Iterable[Key], count: int) -> None:
        """Append ``count`` rows that all have the marks ``has`` and the same numbers."""
        before = self.rows
        for key, values in numbers.items():
            column = self._numbers.get(key)
            if column is None:
                column = self._numbers[key] = array("q", [MISSING]) * before
            elif len(column) < before:
                column.extend(array("q", [MISSING]) * (before - len(column)))
            column.extend(values)
        for key in has:
            mark = self._marks.setdefault(key, bytearray())
            mark.extend(bytes(before - len(mark)))
            mark.extend(b"\x01" * count)
        self.rows = before + count

    def number(self, name: str, of: str = "") -> array[int]:
        """A column of numbers, `MISSING` where a step does not have it."""
        column = self._numbers.get((name, of))
        if column is None:
            return array("q", [MISSING]) * self.rows
        if len(column) < self.rows:  # the last steps do not have it
            column.extend(array("q", [MISSING]) * (self.rows - len(column)))
        return column

    def mark(self, name: str, of: str = "") -> bytearray:
        """1 where a step has something, else 0."""
        mark = self._marks.setdefault((name, of), bytearray())
        mark.extend(bytes(self.rows - len(mark)))
        return mark

    def numbers(self) -> tuple[Key, ...]:
        """The columns of numbers that there are."""
        return tuple(self._numbers)

    def marks(self) -> tuple[Key, ...]:
        """The marks that there are."""
        return tuple(self._marks)

    @property
    def phases(self) -> tuple[str, ...]:
        """Names of the phases of depth one, in the order in which they first appear."""
        return tuple(of for name, of in self._numbers if name == "phase")

    @property
    def devices(self) -> tuple[str, ...]:
        """Devices that steps have windows of, in the order in which they first appear, and of one
        step by name."""
        found = {of: mark.find(1) for (name, of), mark in self._marks.items() if name == "window"}
        return tuple(sorted((of for of in found if found[of] >= 0), key=lambda of: (found[of], of)))

    def chosen(self, rows: Sequence[int]) -> StepColumns:
        """The columns of these rows, in this order."""
        return StepColumns(
            {key: array("q", map(self.number(*key).__getitem__, rows)) for key in self._numbers},
            {key: bytearray(map(self.mark(*key).__getitem__, rows)) for key in [*self._marks]},
            len(rows),
        )

    def full_rows(self) -> Iterator[int]:
        """The rows of full steps (see ``Step.ended_by``)."""
        return (row for row, full in enumerate(self.mark(*FULL)) if full)


def columns_of(steps: Sequence[Step]) -> StepColumns | None:
    """Those that the steps of a large recording have."""
    found: StepColumns | None = getattr(steps, "columns", None)
    return found


def traced_steps(steps: Sequence[Step]) -> list[Step]:
    """The steps that name traces; of a large recording no others are decoded."""
    columns = columns_of(steps)
    if columns is None:
        return [step for step in steps if step.traces]
    return [steps[row] for row, traced in enumerate(columns.mark(*TRACED)) if traced]
