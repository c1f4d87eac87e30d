"""The time of a step on a GPU, from its work, with prices."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final

from gpuprobe.model.plans.step_time import (
    COMPUTE,
    COPIES,
    HOST,
    LINKS,
    MEMORY,
    RANKS,
    BoundShare,
    StepTime,
    TimeShare,
)
from gpuprobe.model.run.work import Action, StepWork, Work, WorkKind, WorkPlace, unpack
from gpuprobe.model.values import Nanoseconds, Unavailable
from gpuprobe.step_time.price import PriceSource
from gpuprobe.step_time.priced import PricedStep, costs, name_of_work, priced_step, spread
from gpuprobe.step_time.prices import Prices
from gpuprobe.step_time.replay import (
    ON_GPU,
    Played,
    RankTasks,
    Resource,
    Task,
    TaskSpan,
    play,
    play_together,
)
from gpuprobe.step_time.together import rank_tasks

VERSION: Final = 6
"""Of the prices and of the replay: increased with every change of the figures. Times of different
versions are not comparable."""
_MOST_ROWS: Final = 2_000


def predict(
    step: StepWork, index: int, prices: Prices, *, per_node: int = 8
) -> StepTime | Unavailable:
    """The time of a step; Unavailable, with the reason, where too much of it has no price.
    ``per_node``: ranks on each node. Raises DataError for damaged columns.
    """
    priced = priced_step(step, prices, per_node)
    if isinstance(priced, Unavailable):
        return priced
    low, high = spread(priced, prices)
    runs = [
        play(RankTasks(priced.tasks, priced.devices, costs(priced, prices, factor, which)))
        for factor, which in _cases(low, high)
    ]
    return _time(step, index, prices, priced, runs)


def predict_together(
    steps: Mapping[int, StepWork], index: int, prices: Prices, *, per_node: int = 8
) -> dict[int, StepTime] | Unavailable:
    """The times of the same step of all ranks of a job, by the rank, which wait for each other;
    Unavailable, with the reason, where one has none, or their calls do not belong together.
    Raises DataError for damaged columns.
    """
    priced = _priced_together(steps, prices, per_node)
    if isinstance(priced, Unavailable):
        return priced
    factors = [spread(one, prices) for one in priced.values()]
    low, high = min(low for low, _ in factors), max(high for _, high in factors)
    runs = []
    for factor, which in _cases(low, high):
        ranks = [rank_tasks(one, costs(one, prices, factor, which)) for one in priced.values()]
        played = play_together(ranks)
        if isinstance(played, Unavailable):
            return played
        runs.append(played)
    return {
        rank: _time(steps[rank], index, prices, one, [run[at] for run in runs])
        for at, (rank, one) in enumerate(priced.items())
    }


def _priced_together(
    steps: Mapping[int, StepWork], prices: Prices, per_node: int
) -> dict[int, PricedStep] | Unavailable:
    """The prices of the same step, by the rank."""
    priced: dict[int, PricedStep] = {}
    for rank, step in steps.items():
        one = priced_step(step, prices, per_node, together=True)
        if isinstance(one, Unavailable):
            return Unavailable(f"rank {rank}: {one.reason}")
        priced[rank] = one
    return priced


def _cases(low: float, high: float) -> tuple[tuple[float, int], ...]:
    """The factor of all prices, and which cost of the host: expected, fast and slow."""
    return (1.0, 1), (low, 0), (high, 2)


def _time(
    step: StepWork, index: int, prices: Prices, priced: PricedStep, runs: Sequence[Played]
) -> StepTime:
    """The time of a step that was played as expected, fast and slow."""
    tasks = priced.tasks
    expected, fast, slow = (_ns(run.ends[-1] - run.ends[-2]) for run in runs)
    spans, ends = runs[0].spans, runs[0].ends
    gpu = [span for span in spans[-1] if span.resource not in _NO_WORK]
    parts = _parts(priced, spans, (ends[-2], ends[-1]), prices)
    tables = _tables(step, parts, tasks, expected)
    waits = _waits(spans)
    flops = sum(task.work.flops for task in _calls(tasks) if task.work is not None)
    return StepTime(
        gpu=prices.name,
        step=index,
        low_ns=min(fast, expected),
        expected_ns=expected,
        high_ns=max(slow, expected),
        gpu_ns=Nanoseconds(sum(_ns(span.end - span.start) for span in gpu)),
        measured=_measured(priced, gpu),
        bounds=_bounds(_limits(parts, waits), expected),
        by_kind=tables["kind"],
        by_phase=tables["phase"],
        by_module=tables["module"],
        by_line=tables["line"],
        flops=flops,
        used=_used(tasks, expected * 1e-9, prices),
        tokens=step.tokens,
        images=step.images,
        samples=step.samples,
        left_out=priced.left_out,
        sources=tuple(prices.provenance),
        by_thread=tables["thread"],
        host_waits=sum(map(_host_waits, tasks)),
        host_waits_ns=_ns(_waited(spans)),
    )


_NO_WORK: Final = (Resource.HOST, Resource.RANKS)


@dataclass(frozen=True, slots=True)
class TimelineSpan:
    """Something that runs in a predicted step: nanoseconds since it began. ``track``: the host's
    thread, ``host`` where that was not recorded, or a stream as ``cuda:0/7``.
    """

    start_ns: int
    end_ns: int
    track: str
    name: str
    work: Work | None
    place: WorkPlace | None
    resource: Resource


def timeline(
    step: StepWork, prices: Prices, *, per_node: int = 8
) -> list[TimelineSpan] | Unavailable:
    """The expected course of a step in a loop of equal ones, in order of start. The host may issue
    it before the GPU has done the step before. Raises DataError for damaged columns.
    """
    priced = priced_step(step, prices, per_node)
    if isinstance(priced, Unavailable):
        return priced
    spans = play(RankTasks(priced.tasks, priced.devices, costs(priced, prices))).spans[-1]
    return _course(step, priced, spans, min(span.start for span in spans))


def timelines_together(
    steps: Mapping[int, StepWork], prices: Prices, *, per_node: int = 8
) -> dict[int, list[TimelineSpan]] | Unavailable:
    """The course of the same step of all ranks, as `predict_together` plays it: since the first of
    them began.
    """
    priced = _priced_together(steps, prices, per_node)
    if isinstance(priced, Unavailable):
        return priced
    played = play_together([rank_tasks(one, costs(one, prices)) for one in priced.values()])
    if isinstance(played, Unavailable):
        return played
    began = min(span.start for one in played for span in one.spans[-1])
    return {
        rank: _course(steps[rank], one, run.spans[-1], began)
        for (rank, one), run in zip(priced.items(), played, strict=True)
    }


def _course(
    step: StepWork, priced: PricedStep, spans: Sequence[TaskSpan], began: float
) -> list[TimelineSpan]:
    _, at = unpack(step.operators, "operators")
    course = []
    for span in sorted(spans, key=lambda span: span.start):
        task = priced.tasks[span.task]
        on_host = span.resource is Resource.HOST
        what = task.action.name.lower().replace("_", " ")
        if task.work is not None:
            named = task.work.kind in (WorkKind.COPY, WorkKind.COLLECTIVE)
            what = task.work.variant if named else name_of_work(task.work)
        if span.resource is Resource.RANKS:
            what = f"{what}: {RANKS}"
        course.append(
            TimelineSpan(
                _ns(span.start - began),
                _ns(span.end - began),
                (task.thread or "host") if on_host else step.streams[task.stream],
                what,
                task.work,
                step.places[at[task.operator - 1]] if task.operator else None,
                span.resource,
            )
        )
    return course


def _ns(seconds: float) -> Nanoseconds:
    return Nanoseconds(round(seconds * 1e9))


def _calls(tasks: Sequence[Task]) -> Iterable[Task]:
    """One task for each call of an operator, and each copy, fill and collective."""
    last = 0
    for task in tasks:
        if task.action is Action.KERNEL:
            if task.operator and task.operator != last:
                last = task.operator
                yield task
        elif task.action in ON_GPU:
            yield task


def _measured(priced: PricedStep, gpu: Sequence[TaskSpan]) -> float:
    total = sum(span.end - span.start for span in gpu)
    measured = sum(
        span.end - span.start
        for span in gpu
        if (price := priced.prices[span.task]) is not None and price.source is PriceSource.MEASURED
    )
    return measured / total if total else 0.0


@dataclass(frozen=True, slots=True)
class _Part:
    """A part of the step, and the task that it is spent on: seconds."""

    start: float
    end: float
    bound: str
    task: int


def _parts(
    priced: PricedStep, spans: list[list[TaskSpan]], window: tuple[float, float], prices: Prices
) -> list[_Part]:
    """The time between the ends of two steps, each moment once: computing comes before
    communication, and that before copies. Otherwise the GPU waits for the host, which issues
    something, or has issued what begins next.
    """
    gaps = [window]
    parts: list[_Part] = []
    for name, resources in _LAYERS:
        layer = sorted(
            (span for step in spans for span in step if span.resource in resources),
            key=lambda span: span.start,
        )
        gaps = _fill(gaps, layer, name, parts)
    starts = sorted((part.start, part.task) for part in parts)
    at = 0
    for start, end in gaps:
        while at < len(starts) and starts[at][0] < end:
            at += 1
        task = starts[min(at, len(starts) - 1)][1] if starts else 0
        parts.append(_Part(start, end, HOST, task))
    return [
        replace(part, bound=_bound(priced.tasks[part.task].work, prices))
        if part.bound == COMPUTE
        else part
        for part in parts
    ]


_LAYERS: Final = (
    (COMPUTE, (Resource.COMPUTE,)),
    (LINKS, (Resource.LINK,)),
    (COPIES, (Resource.TO_DEVICE, Resource.TO_HOST)),
    (RANKS, (Resource.RANKS,)),
    (HOST, (Resource.HOST,)),
)


def _fill(
    gaps: list[tuple[float, float]], layer: Sequence[TaskSpan], name: str, parts: list[_Part]
) -> list[tuple[float, float]]:
    """Add the parts of the gaps that spans cover. Returns what remains of the gaps."""
    rest: list[tuple[float, float]] = []
    first = 0
    for start, end in gaps:
        while first < len(layer) and layer[first].end <= start:
            first += 1
        at, now = first, start
        while at < len(layer) and layer[at].start < end:
            span = layer[at]
            begin, stop = max(now, span.start), min(end, span.end)
            if stop > begin:
                if begin > now:
                    rest.append((now, begin))
                parts.append(_Part(begin, stop, name, span.task))
                now = stop
            at += 1
        if now < end:
            rest.append((now, end))
    return rest


def _waits(spans: list[list[TaskSpan]]) -> list[tuple[float, float]]:
    """When the host waits for the GPU, in order."""
    host = sorted(
        (span.start, span.end) for step in spans for span in step if span.resource is Resource.HOST
    )
    return [(end, start) for (_, end), (start, _) in pairwise(host) if start > end]


def _host_waits(task: Task) -> bool:
    """Whether this is a call by which the host waits for the GPU."""
    if task.action is Action.COPY:
        return task.work is not None and task.work.variant.endswith(" sync")
    return task.action in _WAITING_CALLS


_WAITING_CALLS: Final = (
    Action.HOST_WAITS_EVENT,
    Action.HOST_WAITS_STREAM,
    Action.HOST_WAITS_DEVICE,
)


def _waited(spans: list[list[TaskSpan]]) -> float:
    """How long the host waits for the GPU in the last step, with what it waits for before that."""
    begins = min(
        (span.start for span in spans[-1] if span.resource is Resource.HOST), default=math.inf
    )
    return sum(end - start for start, end in _waits(spans) if end >= begins)


def _limits(parts: Sequence[_Part], waits: Sequence[tuple[float, float]]) -> list[_Part]:
    """The parts by what the step would have to be faster at. What the GPU does before it waits for
    a launch is bound by launches, too, since the host last waited for the GPU: if it ended sooner,
    the GPU would only wait for longer.
    """
    ends = [end for _, end in waits]
    limits: list[_Part] = []
    busy: list[_Part] = []
    for part in sorted(parts, key=lambda part: part.start):
        if part.bound != HOST:
            busy.append(part)
            continue
        at = bisect_right(ends, part.end)
        free = ends[at - 1] if at else 0.0  # the host ran without a wait from then on
        for earlier in busy:
            if earlier.start < free:
                limits.append(replace(earlier, end=min(earlier.end, free)))
            if earlier.end > free:
                limits.append(replace(earlier, start=max(earlier.start, free), bound=HOST))
        busy = []
        limits.append(part)
    return [*limits, *busy]


def _bounds(parts: Sequence[_Part], total: Nanoseconds) -> tuple[BoundShare, ...]:
    sums: dict[str, float] = {}
    for part in parts:
        sums[part.bound] = sums.get(part.bound, 0.0) + part.end - part.start
    rows = _whole({name: (seconds, 0) for name, seconds in sums.items()}, total)
    return tuple(BoundShare(name, ns) for name, ns, _ in rows)


def _whole(
    sums: dict[str, tuple[float, int]], total: Nanoseconds
) -> list[tuple[str, Nanoseconds, int]]:
    """Sums of seconds as rows of nanoseconds that add up to the total, the most first."""
    rows = sorted(sums.items(), key=lambda item: (-item[1][0], item[0]))
    whole = [(name, _ns(seconds), calls) for name, (seconds, calls) in rows]
    if whole:
        name, ns, calls = whole[0]
        whole[0] = name, Nanoseconds(max(0, ns + total - sum(row[1] for row in whole))), calls
    return whole


def _bound(work: Work | None, prices: Prices) -> str:
    """Whether computing or the bandwidth of memory bounds a kernel: by which of the two would take
    longer at the GPU's peaks.
    """
    if work is None or not work.flops:
        return MEMORY
    rate = prices.rate(work.dtype)
    if isinstance(rate, Unavailable):
        return COMPUTE
    return COMPUTE if work.flops / rate >= (work.read + work.written) / prices.bandwidth else MEMORY


def _used(tasks: Sequence[Task], seconds: float, prices: Prices) -> float | Unavailable:
    """The share of the GPU's peak that a step uses: the time that its floating-point operations
    would take at the peaks for their types, of the whole.
    """
    ideal = 0.0
    for task in _calls(tasks):
        if task.work is not None and task.work.flops:
            rate = prices.rate(task.work.dtype)
            if isinstance(rate, Unavailable):
                return rate
            ideal += task.work.flops / rate
    return ideal / seconds if ideal else Unavailable("no matrix products")


def _shares(
    parts: Sequence[_Part],
    tasks: Sequence[Task],
    total: Nanoseconds,
    name_of: Callable[[Task], str],
) -> tuple[TimeShare, ...]:
    sums: dict[str, float] = {}
    calls: dict[str, set[int]] = {}
    for part in parts:
        task = tasks[part.task]
        name = name_of(task)
        sums[name] = sums.get(name, 0.0) + part.end - part.start
        calls.setdefault(name, set()).add(task.operator or -part.task - 1)
    rows = _whole({name: (sums[name], len(calls[name])) for name in sums}, total)
    if len(rows) > _MOST_ROWS:
        rest = rows[_MOST_ROWS - 1 :]
        rows[_MOST_ROWS - 1 :] = [
            (
                f"({len(rest)} more)",
                Nanoseconds(sum(row[1] for row in rest)),
                sum(row[2] for row in rest),
            )
        ]
    return tuple(TimeShare(*row) for row in rows)


def _tables(
    step: StepWork, parts: Sequence[_Part], tasks: Sequence[Task], total: Nanoseconds
) -> dict[str, tuple[TimeShare, ...]]:
    _, at = unpack(step.operators, "operators")
    nowhere = WorkPlace("other", "(outside of operators)", "(no module)")

    def place(task: Task) -> WorkPlace:
        return step.places[at[task.operator - 1]] if task.operator else nowhere

    def kind(task: Task) -> str:
        return "other" if task.work is None else task.work.kind.value

    waits = {HOST: _WAITING, RANKS: RANKS}
    working = [part for part in parts if part.bound not in waits]
    waiting: dict[str, float] = {}
    for part in parts:
        if part.bound in waits:
            name = waits[part.bound]
            waiting[name] = waiting.get(name, 0.0) + part.end - part.start
    left = Nanoseconds(max(0, total - sum(map(_ns, waiting.values()))))
    rows = [TimeShare(name, _ns(seconds)) for name, seconds in waiting.items() if seconds > 0]
    by_kind = sorted((*_shares(working, tasks, left, kind), *rows), key=lambda row: -row.ns)
    return {
        "kind": tuple(by_kind),
        "phase": _shares(parts, tasks, total, lambda task: place(task).phase.partition("/")[0]),
        "module": _shares(parts, tasks, total, lambda task: place(task).module or "(no module)"),
        "line": _shares(parts, tasks, total, lambda task: place(task).place),
        "thread": _shares(parts, tasks, total, lambda task: task.thread) if step.issued else (),
    }


_WAITING: Final = "waiting for the host"
