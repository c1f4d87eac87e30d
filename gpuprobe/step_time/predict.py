"""The time of a step on a GPU, from its work, with prices."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final

from gpuprobe.model.plans.step_time import (
    COMPUTE,
    COPIES,
    HOST,
    LINKS,
    MEMORY,
    BoundShare,
    StepTime,
    TimeShare,
)
from gpuprobe.model.run.work import Action, StepWork, Work, WorkKind, WorkPlace, unpack
from gpuprobe.model.values import Nanoseconds, Unavailable
from gpuprobe.step_time.price import Price, PriceSource
from gpuprobe.step_time.prices import Prices
from gpuprobe.step_time.replay import ON_GPU, Costs, Resource, Task, TaskSpan, play, tasks_of

VERSION: Final = 1
"""Of the prices and of the replay: increased with every change of the figures. Times of different
versions are not comparable."""
MOST_LEFT_OUT: Final = 0.05
"""Of the bytes of a step, or of its floating-point operations, without a price: with more there is
no prediction."""
_MOST_ROWS: Final = 200
_INDEPENDENT: Final = 0.5
"""Of the uncertainty of the prices: what differs by kind of call, and so partly cancels out. The
rest, such as the GPU's clock, is common to all."""
_FASTER: Final = 0.05
_SLOWER: Final = 0.08
"""How much else a program differs, beyond its kernels' prices: its data, the machine, an allocator
that is short of memory. By the spread of the training steps on A100 40 GB to which the share of the
speed under load was fitted (docs/verification/step-time-truths.md): most are within 5%, some are
slower."""
_PEERS: Final = frozenset(("Send", "Recv"))
_ALLOCATION: Final = (20e-6, 200e-6, 1e-3)
"""Seconds of a cudaMalloc, or of a cudaFree without its wait: low, expected, high. A model."""


@dataclass(frozen=True, slots=True)
class _Priced:
    """The tasks of a step, with prices by the index of the task; None where it is not on the GPU or
    has none. ``devices``: by the number of a stream.
    """

    tasks: Sequence[Task]
    prices: Sequence[Price | None]
    left_out: tuple[str, ...]
    devices: Sequence[str]


def predict(
    step: StepWork, index: int, prices: Prices, *, per_node: int = 8
) -> StepTime | Unavailable:
    """The time of a step; Unavailable, with the reason, where too much of it has no price.
    ``per_node``: ranks on each node. Raises DataError for damaged columns.
    """
    priced = _priced(step, prices, per_node)
    if isinstance(priced, Unavailable):
        return priced
    tasks = priced.tasks
    low, high = _range(priced)
    (spans, ends), *others = (
        _played(priced, prices, factor, host) for factor, host in ((1.0, 1), (low, 0), (high, 2))
    )
    expected, fast, slow = (_ns(e[-1] - e[-2]) for e in (ends, *(e for _, e in others)))
    gpu = [span for span in spans[-1] if span.resource is not Resource.HOST]
    parts = _parts(priced, spans, (ends[-2], ends[-1]), prices)
    flops = sum(task.work.flops for task in _calls(tasks) if task.work is not None)
    return StepTime(
        gpu=prices.name,
        step=index,
        low_ns=min(fast, expected),
        expected_ns=expected,
        high_ns=max(slow, expected),
        gpu_ns=Nanoseconds(sum(_ns(span.end - span.start) for span in gpu)),
        measured=_measured(priced, gpu),
        bounds=_bounds(_limits(parts, _waits(spans)), expected),
        **_tables(step, parts, tasks, expected),
        flops=flops,
        used=_used(tasks, expected * 1e-9, prices),
        tokens=step.tokens,
        images=step.images,
        left_out=priced.left_out,
        sources=tuple(prices.provenance),
    )


def with_exchanges(tasks: Sequence[Task]) -> list[Task]:
    """The tasks, with the sends and receipts of one call that has as many of each as there are
    ranks as the exchange among all that they are: torch makes all-to-alls of them, by which the
    experts of a mixture get their tokens.
    """
    joined: list[Task] = []
    at = 0
    while at < len(tasks):
        task = tasks[at]
        end = at
        names: Counter[str] = Counter()
        sent = 0
        while end < len(tasks) and (work := _peer_work(tasks[end], task)) is not None:
            names[work.variant] += 1
            sent += work.read if work.variant == "Send" else 0
            end += 1
        work = task.work
        if work is not None and names and set(names.values()) == {work.sizes[0]} and len(names) > 1:
            joined.append(replace(task, work=replace(work, variant="AlltoAll", read=sent)))
            at = end
        else:
            joined.extend(tasks[at : max(end, at + 1)])
            at = max(end, at + 1)
    return joined


def _peer_work(task: Task, first: Task) -> Work | None:
    """The work of a send or receipt of the same call as the first one."""
    if task.action is not Action.COLLECTIVE or task.work is None:
        return None
    same = (task.stream, task.operator) == (first.stream, first.operator)
    return task.work if same and task.work.variant in _PEERS else None


@dataclass(frozen=True, slots=True)
class TimelineSpan:
    """Something that runs in a predicted step: nanoseconds since it began. ``track``: ``host``, or
    a stream as ``cuda:0/7``.
    """

    start_ns: int
    end_ns: int
    track: str
    name: str
    work: Work | None
    place: WorkPlace | None


def timeline(
    step: StepWork, prices: Prices, *, per_node: int = 8
) -> list[TimelineSpan] | Unavailable:
    """The expected course of a step in a loop of equal ones, in order of start. The host may issue
    it before the GPU has done the step before. Raises DataError for damaged columns.
    """
    priced = _priced(step, prices, per_node)
    if isinstance(priced, Unavailable):
        return priced
    tasks = priced.tasks
    spans, _ = _played(priced, prices, 1.0, 1)
    began = min(span.start for span in spans[-1])
    _, at = unpack(step.operators, "operators")
    course = []
    for span in sorted(spans[-1], key=lambda span: span.start):
        task = tasks[span.task]
        on_host = span.resource is Resource.HOST
        what = task.action.name.lower().replace("_", " ")
        if task.work is not None:
            what = _name(task.work) if task.work.kind is not WorkKind.COPY else task.work.variant
        if task.action is Action.COLLECTIVE and task.work is not None:
            what = task.work.variant
        course.append(
            TimelineSpan(
                _ns(span.start - began),
                _ns(span.end - began),
                "host" if on_host else step.streams[task.stream],
                what,
                task.work,
                step.places[at[task.operator - 1]] if task.operator else None,
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


def _priced(step: StepWork, prices: Prices, per_node: int) -> _Priced | Unavailable:
    """The tasks and their prices; Unavailable, with the reason, where too much has none."""
    if not step.complete:
        return Unavailable("the step made more calls than are kept")
    tasks = with_exchanges(tasks_of(step))
    by_task: list[Price | None] = []
    missing: dict[str, Counter[str]] = {}
    without_bytes = without_flops = every_byte = every_flop = 0.0
    on_host: Counter[str] = Counter()
    for task in tasks:
        work = task.work
        if task.action is Action.OPERATOR and work is not None and work.kind is WorkKind.HOST:
            on_host["operators"] += 1
            on_host["bytes"] += work.read
        if task.action not in ON_GPU:
            by_task.append(None)
            continue
        if task.action is Action.COLLECTIVE and work is not None:
            if work.variant in _PEERS:
                return Unavailable(
                    "ranks send to each other (a pipeline): how long one waits for another "
                    "depends on all of them"
                )
            ranks = work.sizes[0]
            work = replace(work, sizes=(ranks, math.ceil(ranks / per_node)))
        price = _NO_OPERATOR if work is None else prices.of(work, task.kernels)
        bytes_, flops = (0, 0) if work is None else (work.read + work.written, work.flops)
        each = max(1, task.kernels) if task.action is Action.KERNEL else 1
        every_byte += bytes_ / each
        every_flop += flops / each
        if isinstance(price, Unavailable):
            missing.setdefault(price.reason, Counter())[_name(work)] += 1
            without_bytes += bytes_ / each
            without_flops += flops / each
            by_task.append(None)
            continue
        by_task.append(
            price
            if each == 1
            else Price(price.low / each, price.expected / each, price.high / each, price.source)
        )
    rows = tuple(_missing_text(names, reason) for reason, names in missing.items())
    unknown = sum(names[_name(None)] for names in missing.values())  # of unknown bytes, too
    known_launches = sum(price is not None for price in by_task)
    if (
        without_bytes > MOST_LEFT_OUT * every_byte
        or without_flops > MOST_LEFT_OUT * every_flop
        or unknown > MOST_LEFT_OUT * (unknown + known_launches)
    ):
        return Unavailable(f"no price for a large part of the step: {'; '.join(rows[:3])}")
    if on_host:
        rows = (*rows, _host_text(on_host))
    if not any(by_task):
        return Unavailable("the step computes nothing on a GPU")
    devices = [name.partition("/")[0] for name in step.streams]
    return _Priced(tasks, by_task, rows, devices)


_NO_OPERATOR: Final = Unavailable("a kernel that no operator launched")


def _missing_text(names: Counter[str], reason: str) -> str:
    """``51 launches (mm, addmm): why they have no price``."""
    count = names.total()
    listed = [name for name, _ in names.most_common(_MOST_NAMES)]
    more = f" and {len(names) - len(listed)} more" if len(names) > len(listed) else ""
    return f"{count:,} launch{'es' * (count > 1)} ({', '.join(listed)}{more}): {reason}"


_MOST_NAMES: Final = 3


def _name(work: Work | None) -> str:
    return "a kernel" if work is None else work.operator.removeprefix("aten::")


def _host_text(on_host: Counter[str]) -> str:
    count, size = on_host["operators"], on_host["bytes"] / 2**20
    return (
        f"{count:,} operator{'s' * (count > 1)} on tensors of the CPU ({size:,.0f} MiB): how long "
        "they take depends on the machine's processor"
    )


def _range(priced: _Priced) -> tuple[float, float]:
    """The factors by which all prices are lower and higher together."""
    total = low = high = 0.0
    by_kind: dict[Work, list[float]] = {}
    for task, price in zip(priced.tasks, priced.prices, strict=True):
        if price is None or task.work is None:
            continue
        total += price.expected
        below, above = price.expected - price.low, price.high - price.expected
        low, high = low + below, high + above
        sums = by_kind.setdefault(task.work, [0.0, 0.0])
        sums[0] += below
        sums[1] += above
    if not total:
        return 1.0, 1.0
    free = [math.sqrt(sum(sums[side] ** 2 for sums in by_kind.values())) for side in (0, 1)]
    common = 1 - _INDEPENDENT
    below, above = (
        (common * sums + _INDEPENDENT * each) / total
        for sums, each in zip((low, high), free, strict=True)
    )
    return 1 - math.hypot(below, _FASTER), 1 + math.hypot(above, _SLOWER)


def _played(
    priced: _Priced, prices: Prices, factor: float, which: int
) -> tuple[list[list[TaskSpan]], list[float]]:
    """The spans of two steps, and when each ended, in seconds. ``which``: the low (0),
    expected (1) or high (2) cost of the host.
    """
    call, launch = (_at(price, which) for price in (prices.host_call, prices.host_launch))
    gpu, host = [], []
    first = True
    launching = {task.operator for task in priced.tasks if task.action in ON_GPU}
    for task, price in zip(priced.tasks, priced.prices, strict=True):
        gpu.append(0.0 if price is None else price.expected * factor)
        action = task.action
        if action is Action.OPERATOR:
            # One without a launch, such as a view, takes about as long as a launch.
            host.append(call if task.operator in launching else launch)
            first = True
        elif action is Action.KERNEL:
            # The first launch is part of the call.
            host.append(0.0 if first and task.operator else launch)
            first = False
        elif action in (Action.ALLOCATE, Action.RELEASE):
            host.append(_ALLOCATION[which])
        else:
            host.append(launch)
    return play(priced.tasks, priced.devices, Costs(gpu, host, launch))


def _at(price: Price, which: int) -> float:
    return (price.low, price.expected, price.high)[which]


def _measured(priced: _Priced, gpu: Sequence[TaskSpan]) -> float:
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
    priced: _Priced, spans: list[list[TaskSpan]], window: tuple[float, float], prices: Prices
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

    on_gpu = [part for part in parts if part.bound != HOST]
    waiting = sum(part.end - part.start for part in parts) - sum(
        part.end - part.start for part in on_gpu
    )
    by_kind = _shares(on_gpu, tasks, Nanoseconds(max(0, total - _ns(waiting))), kind)
    if waiting > 0:
        by_kind = tuple(
            sorted((*by_kind, TimeShare(_WAITING, _ns(waiting))), key=lambda row: -row.ns)
        )
    return {
        "by_kind": by_kind,
        "by_phase": _shares(parts, tasks, total, lambda task: place(task).phase.partition("/")[0]),
        "by_module": _shares(parts, tasks, total, lambda task: place(task).module or "(no module)"),
        "by_line": _shares(parts, tasks, total, lambda task: place(task).place),
    }


_WAITING: Final = "waiting for the host"
