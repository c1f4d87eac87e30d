"""Stragglers: the rank that the others wait for, in how many steps, and in which phases it is slow.

Ranks that exchange gradients finish a step together, and the early ones wait. So the straggler is
the rank that does *not* wait: it arrives last, because its own work takes longest. A rank's *own
time* in a step is the step without the time that it waited for others (`Phase.waited_ns`: in calls
of ``torch.distributed``, and at the end of the backward pass of DistributedDataParallel, once its
own gradients are computed). The rank with the longest own time arrives last.

Calls that copy tensors to a device (`Phase.copied_ns`) are a separate phase here, ``copy``.

In recordings without waits by phase (of GPUs, or of an older gpuprobe) own time excludes the whole
backward pass, and the collectives outside.
"""

from __future__ import annotations

import math
import operator
from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, TypeVar

from gpuprobe.model.report import Key, RankTime, TimeDifference
from gpuprobe.model.run.columns import DURATION, INDEX, MISSING, WAITED, StepColumns
from gpuprobe.model.run.recording import RankRecording
from gpuprobe.model.values import ReadStatus, Unavailable

_K = TypeVar("_K", bound=Key)

BACKWARD: Final = "backward"
COPY: Final = "copy"
_SETUP: Final = "setup"


def median_low(values: Iterable[int]) -> int:
    """Like `statistics.median_low`, whose module takes 4 ms to import."""
    ordered = sorted(values)
    return ordered[(len(ordered) - 1) // 2]


def phase_waits(columns: StepColumns) -> dict[str, array[int]] | None:
    """The time that each step waited for other ranks, by phase of depth one; None for recordings
    without waits by phase. Nanoseconds; `MISSING` in steps without that phase.
    """
    found = {path: columns.number("phase_waited", path) for path in columns.phases}
    known = any(max(waited, default=MISSING) != MISSING for waited in found.values())
    return found if known else None


def own_phases(columns: StepColumns) -> dict[str, array[int]]:
    """Each step's own time by phase of depth one. Without waits by phase, ``collectives`` is a
    negative phase that is subtracted from the others. Nanoseconds.
    """
    known = phase_waits(columns)
    if known is None:
        return _with_copies(_without_backward(columns), columns)
    found = {
        path: array(
            "q",
            (
                0 if MISSING in (spent, waited) else max(0, spent - waited)
                for spent, waited in zip(columns.number("phase", path), known[path], strict=True)
            ),
        )
        for path in columns.phases
        if path != _SETUP
    }
    return _with_copies(found, columns)


def _with_copies(phases: dict[str, array[int]], columns: StepColumns) -> dict[str, array[int]]:
    """Move the time of copies to a device from the phases to a separate one, ``copy``."""
    total = array("q", bytes(8 * columns.rows))
    for path in [path for path in phases if path in columns.phases]:
        copied = columns.number("phase_copied", path)
        if max(copied, default=MISSING) > 0:
            within = array("q", map(min, _or_zero(copied), phases[path]))
            phases[path] = array("q", map(operator.sub, phases[path], within))
            total = _sum((total, within), columns.rows)
    return {**phases, COPY: total} if any(total) else phases


def _without_backward(columns: StepColumns) -> dict[str, array[int]]:
    """Own time of recordings with the total time of collectives only: it is subtracted as if none
    were in the backward pass, down to an own time of 0.
    """
    phases = {
        path: _or_zero(columns.number("phase", path))
        for path in columns.phases
        if path not in (BACKWARD, _SETUP)
    }
    waited = columns.number(*WAITED)
    if any(waited):
        total = _sum(phases.values(), columns.rows)
        phases["collectives"] = array("q", (-min(w, t) for w, t in zip(waited, total, strict=True)))
    return phases


def own_ns(columns: StepColumns) -> array[int]:
    """Each step's own time in nanoseconds."""
    return _sum(own_phases(columns).values(), columns.rows)


def _or_zero(column: array[int]) -> array[int]:
    if MISSING in column:
        return array("q", (0 if value == MISSING else value for value in column))
    return column


def _sum(columns: Iterable[array[int]], rows: int) -> array[int]:
    total = array("q", bytes(8 * rows))
    for column in columns:
        total = array("q", map(operator.add, total, column))
    return total


def compare_times(
    ranks: Sequence[RankRecording],
) -> tuple[dict[int, int], RankTime | Unavailable]:
    """Own time per step of each rank, and the rank that the others wait for."""
    if any(rank.session.virtual for rank in ranks):
        return {}, Unavailable(
            "step times on a simulated GPU are not comparable", ReadStatus.NOT_COLLECTED
        )
    by_number = {rank.session.rank: rank for rank in ranks}
    found = {number: full_rows(rank.columns) for number, rank in sorted(by_number.items())}
    common = sorted(set.intersection(*(set(rows) for rows in found.values())))
    if not common or len(found) < 2:
        return {}, Unavailable("no step was recorded by every rank", ReadStatus.NOT_COLLECTED)
    phases: dict[int, dict[str, array[int]]] = {}
    for number, index_rows in found.items():
        rows = [index_rows[index] for index in common]
        phases[number] = {
            phase: array("q", map(column.__getitem__, rows))
            for phase, column in own_phases(by_number[number].columns).items()
        }
    own = {number: _sum(parts.values(), len(common)) for number, parts in phases.items()}
    return {number: sum(times) // len(common) for number, times in own.items()}, _slowest(
        own,
        phases,
        {
            number: [by_number[number].columns.number(*DURATION)[rows[index]] for index in common]
            for number, rows in found.items()
        },
    )


def _slowest(
    own: Mapping[int, array[int]],
    phases: Mapping[int, Mapping[str, array[int]]],
    durations: Mapping[int, Sequence[int]],
) -> RankTime:
    numbers = list(own)
    steps = len(own[numbers[0]])
    late: dict[int, list[int]] = {number: [] for number in numbers}
    middle = (len(numbers) - 2) // 2
    for times in zip(*own.values(), strict=True):
        ordered = sorted(times)
        # The median of the other ranks; in small jobs the rank itself is one of two.
        low, high = ordered[middle], ordered[middle + 1]
        for number, spent in zip(numbers, times, strict=True):
            late[number].append(spent - (high if spent <= low else low))
    median = {number: median_low(values) for number, values in late.items()}
    sums = {number: sum(times) for number, times in own.items()}
    slowest = max(median, key=lambda number: (median[number], sums[number], -number))
    usual = median_low(spent for number, spent in sums.items() if number != slowest)
    typical = next(n for n, spent in sums.items() if spent == usual and n != slowest)
    totals = [
        {phase: sum(column) for phase, column in phases[number].items()}
        for number in (slowest, typical)
    ]
    return RankTime(
        slowest=slowest,
        typical=typical,
        steps=steps,
        own_ns=sums[slowest],
        typical_ns=sums[typical],
        step_ns=sum(durations[typical]),
        phases=tuple(TimeDifference(key, ns) for key, ns in differences(*totals)),
        late_ns=median[slowest],
        late_steps=sum(one > 0 for one in late[slowest]),
        chance_ns=_chance(late[slowest], median[slowest], len(numbers)),
    )


def _chance(late: Sequence[int], median: int, ranks: int) -> int:
    """The median lateness that the last of so many ranks may have by chance: four standard errors
    above the average maximum of N normally distributed values, which is below sqrt(2 ln N). Four,
    because the deviation of about twenty steps is itself uncertain by a fifth.

    The standard error of a median is 1.2533 times that of a mean, and the standard deviation 1.4826
    times the median deviation, which a few outliers do not change.
    """
    deviation = 1.4826 * median_low(abs(one - median) for one in late)
    error: float = 1.2533 * deviation / len(late) ** 0.5
    return int((4 + (2 * math.log(ranks)) ** 0.5) * error)


def full_rows(columns: StepColumns, *, first: bool = False) -> dict[int, int]:
    """The rows of steps with representative durations (see `full_steps`), by index. ``first``: all
    full steps.
    """
    index = columns.number(*INDEX)
    rows = list(columns.full_rows())
    chosen = rows if first else rows[1:]
    return {index[row]: row for row in (chosen or rows or range(columns.rows))}


def differences(one: Mapping[_K, int], two: Mapping[_K, int]) -> list[tuple[_K, int]]:
    """The differences ``one - two`` by key, the largest first; equal ones are left out."""
    found = [(key, one.get(key, 0) - two.get(key, 0)) for key in {**one, **two}]
    return sorted((d for d in found if d[1]), key=lambda d: (-abs(d[1]), str(d[0])))
