"""A step's calls to the GPU with the price of each, and how far all prices may be off together."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Final

from gpuprobe.model.run.work import Action, StepWork, Work, WorkKind
from gpuprobe.model.values import Unavailable
from gpuprobe.step_time import traffic
from gpuprobe.step_time.price import Price, PriceSource
from gpuprobe.step_time.prices import Prices
from gpuprobe.step_time.replay import ON_GPU, Costs, Task, tasks_of

MOST_LEFT_OUT: Final = 0.05
"""Of the bytes of a step, or of its floating-point operations, without a price: with more there is
no prediction."""
_FASTER: Final = 0.08
_SLOWER: Final = 0.08
"""How much else a program differs, beyond its kernels' prices: its data, the machine, its versions
of libraries, an allocator that is short of memory. The least by which, with constants that a source
had no part in, nine of ten of its rows marked fit are in the range: mosaicml-examples' on A100
40 GB, down to 0.9 of the expected time, and NVIDIA's of BERT (docs/verification/step-time.md)."""
PEERS: Final = frozenset(("Send", "Recv"))
_ALLOCATION: Final = (20e-6, 200e-6, 1e-3)
"""Seconds of a cudaMalloc, or of a cudaFree without its wait: low, expected, high. A model."""


@dataclass(frozen=True, slots=True)
class PricedStep:
    """The tasks of a step, with prices by the index of the task; None where it is not on the GPU or
    has none. ``devices``: by the number of a stream.
    """

    tasks: Sequence[Task]
    prices: Sequence[Price | None]
    left_out: tuple[str, ...]
    devices: Sequence[str]


def priced_step(
    step: StepWork, prices: Prices, per_node: int, *, together: bool = False
) -> PricedStep | Unavailable:
    """The tasks and their prices; Unavailable, with the reason, where too much has none.
    ``together``: it is played with the other ranks of its job, so it may send to them.
    """
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
            if work.variant in PEERS and (not together or len(work.sizes) < _OF_A_MESSAGE):
                return _NOT_TOGETHER
            work = replace(work, sizes=_over_nodes(work, per_node))
        price = _NO_OPERATOR if work is None else prices.of(work, task.kernels)
        bytes_, flops = (0, 0) if work is None else (work.read + work.written, work.flops)
        each = max(1, task.kernels) if task.action is Action.KERNEL else 1
        every_byte += bytes_ / each
        every_flop += flops / each
        if isinstance(price, Unavailable):
            missing.setdefault(price.reason, Counter())[name_of_work(work)] += 1
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
    unknown = sum(names[name_of_work(None)] for names in missing.values())  # of unknown bytes, too
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
    by_task = _of_the_slowest(tasks, by_task)
    devices = [name.partition("/")[0] for name in step.streams]
    return PricedStep(tasks, by_task, rows, devices)


def _of_the_slowest(tasks: Sequence[Task], prices: list[Price | None]) -> list[Price | None]:
    """The prices of kernels on the GPU that the others of the job wait for."""
    meeting = (task.work for task in tasks if task.action is Action.COLLECTIVE)
    slower = slowest(max((work.sizes[0] for work in meeting if work and work.sizes), default=1))
    return [
        price
        if price is None or task.action is not Action.KERNEL
        else Price(price.low * slower, price.expected * slower, price.high * slower, price.source)
        for task, price in zip(tasks, prices, strict=True)
    ]


_VARIATION: Final = 0.025
"""Standard deviation of the speed of GPUs of one kind, fitted to NVIDIA's rows of BERT's
pretraining, whose GPUs meet once in 128 to 1,024 micro-batches: 4, 8 and 16 take 3, 4 and 6% longer
than one. 8% between the fastest and the slowest are published (arXiv 2208.11035)."""


def slowest(ranks: int) -> float:
    """How much longer the slowest of that many GPUs takes than one: the expected maximum of so many
    normal values, by Blom's approximation.
    """
    if ranks < 2:
        return 1.0
    return 1 + _VARIATION * NormalDist().inv_cdf((ranks - 0.375) / (ranks + 0.25))


_NOT_TOGETHER: Final = Unavailable(
    "ranks send to each other (a pipeline), so how long one waits depends on all of them: record "
    "the whole job, as by gpuprobe run --gpu 4xGPU --level trace -- torchrun --nproc-per-node 4 "
    "SCRIPT"
)
_OF_A_MESSAGE: Final = 5
"""The sizes of a send or receipt between recorded processes."""


def _over_nodes(work: Work, per_node: int) -> tuple[int, int]:
    """The ranks of a collective, or of a message, and on how many nodes they are."""
    if work.variant in PEERS and len(work.sizes) == _OF_A_MESSAGE:
        _, _, rank, peer, _ = work.sizes
        return 2, 1 + (rank // per_node != peer // per_node)
    ranks = work.sizes[0]
    return ranks, math.ceil(ranks / per_node)


_NO_OPERATOR: Final = Unavailable("a kernel that no operator launched")


def _missing_text(names: Counter[str], reason: str) -> str:
    """``51 launches (mm, addmm): why they have no price``."""
    count = names.total()
    listed = [name for name, _ in names.most_common(_MOST_NAMES)]
    more = f" and {len(names) - len(listed)} more" if len(names) > len(listed) else ""
    return f"{count:,} launch{'es' * (count > 1)} ({', '.join(listed)}{more}): {reason}"


_MOST_NAMES: Final = 3


def name_of_work(work: Work | None) -> str:
    return "a kernel" if work is None else work.operator.removeprefix("aten::")


def _host_text(on_host: Counter[str]) -> str:
    count, size = on_host["operators"], on_host["bytes"] / 2**20
    return (
        f"{count:,} operator{'s' * (count > 1)} on tensors of the CPU ({size:,.0f} MiB): how long "
        "they take depends on the machine's processor"
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
            joined.append(
                replace(
                    task, work=replace(work, sizes=work.sizes[:3], variant="AlltoAll", read=sent)
                )
            )
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
    return task.work if same and task.work.variant in PEERS else None


def spread(step: PricedStep, prices: Prices) -> tuple[float, float]:
    """The factors by which all prices are lower and higher together. What is off for one reason is
    off together: the speed that multiplications keep under load, how well a kind of kernel uses
    the memory. Reasons are independent of each other.
    """
    total = 0.0
    kept = _Sums()
    families: dict[tuple[str, ...], _Sums] = {}
    for task, price in zip(step.tasks, step.prices, strict=True):
        work = task.work
        if price is None or work is None:
            continue
        total += price.expected
        off = price.expected - price.low, price.high - price.expected
        if work.kind in _MULTIPLYING:
            factors = prices.kept(work)
            load = (
                min(off[0], price.expected * (1 - factors.low)),
                min(off[1], price.expected * (factors.high - 1)),
            )
            kept.add(load)
            off = _rest(off[0], load[0]), _rest(off[1], load[1])
        families.setdefault(_family(work, price), _Sums()).add(off)
    if not total:
        return 1.0, 1.0
    reasons: dict[tuple[str, ...], list[_Sums]] = {}
    for family, sums in families.items():
        reasons.setdefault(family[:2], []).append(sums)
    below, above = (
        math.hypot(
            kept.off[side],
            *(_off([one.off[side] for one in some]) for some in reasons.values()),
        )
        / total
        for side in (0, 1)
    )
    return 1 - math.hypot(below, _FASTER), 1 + math.hypot(above, _SLOWER)


@dataclass(slots=True)
class _Sums:
    """Seconds by which prices may be lower and higher."""

    off: tuple[float, float] = (0.0, 0.0)

    def add(self, more: tuple[float, float]) -> None:
        self.off = self.off[0] + more[0], self.off[1] + more[1]


def _rest(whole: float, part: float) -> float:
    """What is left of a deviation without one that is independent."""
    return math.sqrt(max(0.0, whole * whole - part * part))


_ALIKE: Final = 0.3
"""How far the errors of two measured products of different sizes are alike (a correlation). Of
sizes that were left out of the fits, 8 of 10 kernels are within 5.5%, and sums of four within 3.7%
(``benchmarks/step_time_kernels.py``, seven GPUs)."""


def _off(each: Sequence[float]) -> float:
    """The deviation of a sum of products that have a part of their errors in common."""
    own = sum(one * one for one in each)
    return math.sqrt(_ALIKE * sum(each) ** 2 + (1 - _ALIKE) * own)


def _family(work: Work, price: Price) -> tuple[str, ...]:
    """Calls whose prices are off for the same reason, apart from the load: a kind of kernel, a
    link. Measured products of different sizes are partly so: the third name is their size.
    """
    kind = _MULTIPLYING.get(work.kind)
    if kind is None:
        return work.kind.value, traffic.family(work)
    measured = work.kind is WorkKind.MATMUL and price.source is not PriceSource.GENERIC
    return kind, "", f"{work.sizes} {work.variant}" if measured else ""


_MULTIPLYING: Final = {
    WorkKind.MATMUL: "products",
    WorkKind.ATTENTION: "attention",
    WorkKind.ATTENTION_BACKWARD: "attention",
    WorkKind.CONVOLUTION: "convolutions",
    WorkKind.CONVOLUTION_BACKWARD: "convolutions",
}


def costs(step: PricedStep, prices: Prices, factor: float = 1.0, which: int = 1) -> Costs:
    """The seconds of each task, all prices times a factor. ``which``: the low (0), expected (1) or
    high (2) cost of the host.
    """
    call, launch = (_at(price, which) for price in (prices.host_call, prices.host_launch))
    gpu, host = [], []
    first = True
    launching = {task.operator for task in step.tasks if task.action in ON_GPU}
    for task, price in zip(step.tasks, step.prices, strict=True):
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
    return Costs(gpu, host, launch)


def _at(price: Price, which: int) -> float:
    return (price.low, price.expected, price.high)[which]
