"""What-if: the requests of a trace under other allocator settings.

The program's requests (sizes, streams, pools, the order of allocations and frees, and its calls
of ``empty_cache``) stay the same; the blocks that serve them are simulated. A real run may differ
in three points: addresses, which are simulated in several orders; the history before the trace,
which is replaced by re-allocating the live blocks, lowest address first, in an empty allocator; and
a program that reacts to memory pressure.

Because of the second point, every number is compared with a simulation of the recorded settings,
not with the recording itself.

A recording leaves some of the program's actions open, which may matter under other settings. Each
possible reading is simulated (`_readings`); if figures differ, the outcome lists the question in
``undecided``.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple

from gpuprobe.allocator.blocks import PoolBlock, TieRule
from gpuprobe.allocator.driver import ADDRESS_ORDERS, DRIVER_ORDERS, SimulatedDriver
from gpuprobe.allocator.evidence import own_allocators, splitting
from gpuprobe.allocator.replay import TraceReplay, event_pools
from gpuprobe.allocator.rules import MIB, round_size
from gpuprobe.allocator.settings import differences, memory_fraction, to_conf
from gpuprobe.allocator.simulator import Simulator
from gpuprobe.allocator.start_state import StartState, pool_indices, start_state
from gpuprobe.model.actions import (
    ALLOC,
    FREE_COMPLETED,
    FREE_REQUESTED,
    OOM,
    SEGMENT_FREE,
    SEGMENT_UNMAP,
)
from gpuprobe.model.io.files import gc_paused
from gpuprobe.model.trace import AllocatorSettings, EventColumns, MemoryTrace

LIMITS: Final = (
    "calls of empty_cache that released nothing leave no trace: they are left out",
    "addresses of new segments are simulated: results that depend on their order are ranges over "
    "several orders",
    "blocks alive before the trace are re-allocated first, lowest address first, into an empty "
    "allocator: memory cached before the trace is ignored",
    "the program is assumed to request the same memory in the same order",
)
"""The limits of every what-if; printed with its numbers."""

_WORTH = 0.02
_WORTH_BYTES = 20 * MIB
_WORTH_MORE = 0.05


@dataclass(frozen=True, slots=True)
class Range:
    """The least and the most of a number that may depend on the order of addresses."""

    least: int
    most: int


@dataclass(frozen=True, slots=True)
class WhatIfOutcome:
    """A trace under some settings. Sizes in bytes, calls counted within the trace.

    ``fragmentation`` is in millionths: the part of reserved memory that was not in use when
    reserved memory first reached its peak. ``would_oom``: number of address orders, out of
    ``orders``, in which a request failed that the recording served. ``undecided``: the questions
    that the recording leaves open and that change figures, whose ranges cover each answer.
    """

    settings: AllocatorSettings
    change: str
    peak_allocated: Range
    peak_reserved: Range
    fragmentation: Range
    device_allocs: Range
    device_frees: Range
    retries: Range
    ooms: Range
    would_oom: int
    served_after_all: Range  # requests that failed in the recording and were served here
    orders: int
    undecided: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class SettingsAdvice:
    """The smallest change of settings that helps; ``best`` is None if no candidate does.

    ``gain`` is the reduction of peak reserved memory, in the worst address order. ``fits``: the
    recorded settings run out of memory at the capacity and this change does not.
    """

    baseline: WhatIfOutcome
    tried: tuple[WhatIfOutcome, ...]
    best: WhatIfOutcome | None
    gain: int
    fits: bool


@dataclass(slots=True)
class _Measured:
    """The result of one simulation: ``figures`` by field of `WhatIfOutcome`, and the number of
    requests that ``failed``."""

    figures: dict[str, int]
    failed: int


@dataclass(frozen=True, slots=True)
class _Reading:
    """One possible reading of a recording.

    ``flushes``: the events at which the program released cached memory. ``dropped``: by event, the
    pools that are released after it. ``whole``: pools whose blocks are not split. ``overflow``:
    pools that serve requests when the default pool has no memory; they did so at ``overflows``.
    ``least``: failed requests had the smallest size that rounds to the recorded one. ``tie_rule``:
    the rule of the program's torch.
    """

    flushes: frozenset[int]
    whole: frozenset[int]
    dropped: Mapping[int, Sequence[int]] = field(default_factory=dict)
    overflow: frozenset[int] = frozenset()
    overflows: frozenset[int] = frozenset()
    least: bool = False
    tie_rule: TieRule = "address"


class _Pools(NamedTuple):
    """The pool index of every event, torch's id of each index, and the pools with a separate
    allocator.
    """

    of_events: Sequence[int]
    ids: Mapping[int, tuple[int, int]]
    own_allocators: frozenset[int]


def _pools(trace: MemoryTrace, settings: AllocatorSettings) -> _Pools:
    of_events = event_pools(trace)
    ids = {index: pool for pool, index in pool_indices(trace).items()}
    return _Pools(of_events, ids, own_allocators(trace, settings, of_events))


_POOLS_HELD: Final = "how long a graph or the program held a private pool"
_SPLIT: Final = "whether a MemPool splits its blocks"
_OVERFLOW: Final = "whether a MemPool serves when the default pool has no memory"
_PROGRAM_RELEASES: Final = "which releases of cached memory were the program's own"
_TIES: Final = "which version of torch ran: of equal free blocks, each takes another"
_ROUNDED: Final = "the size of requests that failed: it was recorded rounded"


def _readings(
    trace: MemoryTrace,
    recorded: TraceReplay,
    pools_of: _Pools,
    settings: AllocatorSettings,
    capacity: int | None,
) -> tuple[_Reading, list[tuple[str, _Reading]]]:
    """The usual reading of a recording, and an alternative for each question that it leaves
    open."""
    events, (pools, ids, _) = trace.events, pools_of
    most = None if capacity is None else int(memory_fraction(recorded.settings) * capacity)
    flushes = frozenset(recorded.flushes)
    unclear = frozenset(one.event for one in recorded.unclear)
    if most is not None:
        # The allocation released the memory itself: it would not have fitted otherwise.
        own = frozenset(one.event for one in recorded.unclear if one.needed > most)
        flushes, unclear = flushes - own, unclear - own
    whole, either, _ = splitting(trace, recorded.settings, pools)
    usual = _Reading(flushes, whole, tie_rule=recorded.tie_rule)
    others: list[tuple[str, _Reading]] = []
    if unclear - flushes:
        others.append((_PROGRAM_RELEASES, replace(usual, flushes=flushes | unclear)))
    if most is None and unclear & flushes:
        others.append((_PROGRAM_RELEASES, replace(usual, flushes=flushes - unclear)))
    for rule in recorded.tie_rules[1:]:
        others.append((_TIES, replace(usual, tie_rule=rule)))
    private = {pool for pool in pools if pool}
    if private:
        last = dict(recorded.held)
        for index, code, pool in zip(range(len(events)), events.action, pools, strict=True):
            if pool and code in (ALLOC, OOM):
                last[pool] = max(last.get(pool, 0), index)
        dropped: dict[int, list[int]] = {}
        for pool, index in last.items():
            dropped.setdefault(index, []).append(pool)
        others.append((_POOLS_HELD, replace(usual, dropped=dropped)))
    if either:
        others.append((_SPLIT, replace(usual, whole=whole | either)))
    mem_pools = frozenset(pool for pool in private if ids[pool][0] == 0)
    if mem_pools:
        overflows = (one for one in recorded.overflows if most is None or one.needed > most)
        served = frozenset(one.event for one in overflows)
        others.append((_OVERFLOW, replace(usual, overflow=mem_pools, overflows=served)))
    failed = {size for size, code in zip(events.size, events.action, strict=True) if code == OOM}
    if any(
        round_size(_least(size, recorded.settings), settings) != round_size(size, settings)
        for size in failed
    ):
        others.append((_ROUNDED, replace(usual, least=True)))
    return usual, others


def _least(size: int, settings: AllocatorSettings) -> int:
    """The smallest request that is rounded up to ``size``."""
    return bisect_left(range(size), size, key=lambda request: round_size(request, settings))


def what_if(
    trace: MemoryTrace,
    recorded: TraceReplay,
    settings: AllocatorSettings,
    *,
    capacity: int | None = None,
    orders: Sequence[str] = ADDRESS_ORDERS,
) -> WhatIfOutcome:
    """Simulate the trace under ``settings``, on a device with ``capacity`` bytes for the allocator
    (None: unlimited). ``recorded`` is the trace's replay, which located calls of ``empty_cache``.
    """
    with gc_paused():
        state = start_state(trace, recorded.settings)
        pools = _pools(trace, recorded.settings)
        usual, others = _readings(trace, recorded, pools, settings, capacity)

        def run(reading: _Reading, order: str) -> _Measured:
            return _simulate(trace, recorded, pools, reading, state, settings, capacity, order)

        runs = [run(usual, order) for order in orders]
        read = [run(reading, orders[0]) for _, reading in others]
    figures = {
        name: _range([one.figures[name] for one in (*runs, *read)]) for name in runs[0].figures
    }
    return WhatIfOutcome(
        settings=settings,
        change=differences(recorded.settings, settings),
        would_oom=sum(run.failed > 0 for run in runs),
        orders=len(runs),
        undecided=tuple(
            dict.fromkeys(
                question
                for (question, _), other in zip(others, read, strict=True)
                if other.figures != runs[0].figures or bool(other.failed) != bool(runs[0].failed)
            )
        ),
        **figures,
    )


@dataclass(frozen=True, slots=True)
class AddressOrderPeaks:
    """The peaks of a recorded run, in bytes, under both orders of addresses that drivers are known
    to have (`gpuprobe.allocator.driver.DRIVER_ORDERS`): ``descending`` on ordinary Linux,
    ``ascending`` in some sandboxes.
    """

    descending_allocated: int
    descending_reserved: int
    ascending_allocated: int
    ascending_reserved: int


def peaks_by_address_order(trace: MemoryTrace, recorded: TraceReplay) -> AddressOrderPeaks:
    """Simulate the recorded settings in both orders of addresses. ``recorded``: the trace's
    replay.
    """
    with gc_paused():
        state = start_state(trace, recorded.settings)
        pools = _pools(trace, recorded.settings)
        usual, _ = _readings(trace, recorded, pools, recorded.settings, None)
        descending, ascending = (
            _simulate(trace, recorded, pools, usual, state, recorded.settings, None, order).figures
            for order in DRIVER_ORDERS
        )
    return AddressOrderPeaks(
        descending["peak_allocated"],
        descending["peak_reserved"],
        ascending["peak_allocated"],
        ascending["peak_reserved"],
    )


def _range(values: list[int]) -> Range:
    return Range(min(values), max(values))


def _simulate(
    trace: MemoryTrace,
    recorded: TraceReplay,
    pools_of: _Pools,
    reading: _Reading,
    state: StartState,
    settings: AllocatorSettings,
    capacity: int | None,
    order: str,
) -> _Measured:
    """Simulate one reading of the trace in one address order."""
    pools, ids, _ = pools_of
    sim = _simulator(pools_of, reading, settings, SimulatedDriver(capacity, order), capacity)
    live = _allocate_old(sim, state)
    old = len(state.unplaced) + sum(len(part.blocks) for part in state.parts())
    failed = old - len(live)
    before = {name: getattr(sim, name) for name in _CALLS}
    served = 0
    events = trace.events
    # ``live`` maps a recorded address to the block's place here. A request that failed has no
    # entry: its free is skipped too.
    for index, code, address, size, stream, pool in zip(
        range(len(events)),
        events.action,
        events.address,
        events.size,
        events.column("stream"),
        pools,
        strict=True,
    ):
        if code == ALLOC:
            if index in reading.overflows:
                pool = 0
            block = request(sim, size, stream, pool, graph=ids[pool][0] > 0)
            if block is None:
                failed += 1
            else:
                live[address] = block
        elif code == FREE_REQUESTED:
            block = live.get(address)
            if block is not None and block.allocated:  # a damaged trace may free it again
                sim.request_free(block)
        elif code == FREE_COMPLETED:
            _complete(sim, live.pop(address, None))
        elif code == OOM:
            if reading.least:
                size = _least(size, recorded.settings)
            served += _serve(sim, size, stream, pool, graph=ids[pool][0] > 0)
        elif code in (SEGMENT_FREE, SEGMENT_UNMAP):
            _release(sim, events, pools_of, index, flush=index in reading.flushes)
        for dropped in reading.dropped.get(index, ()):
            _drop(sim, dropped, ids[dropped])
    idle = sim.peak_reserved - min(sim.active_at_peak, sim.peak_reserved)
    figures = {
        "peak_allocated": sim.peak_allocated,
        "peak_reserved": sim.peak_reserved,
        "fragmentation": idle * 1_000_000 // sim.peak_reserved if sim.peak_reserved else 0,
        "served_after_all": served,
    }
    figures |= {name: getattr(sim, name) - count for name, count in before.items()}
    return _Measured(figures, failed)


def _simulator(
    pools_of: _Pools,
    reading: _Reading,
    settings: AllocatorSettings,
    driver: SimulatedDriver,
    device_memory: int | None,
) -> Simulator:
    """An empty simulator whose pools have the traits of the reading."""
    sim = Simulator(settings, driver, device_memory=device_memory, tie_rule=reading.tie_rule)
    for index in reading.whole:
        sim.pool(index).no_split = True
    for index in pools_of.own_allocators:
        sim.pool(index).own_allocator = True
    for index in reading.overflow:
        sim.pool(index).use_on_oom = True
    return sim


def _complete(sim: Simulator, block: PoolBlock | None) -> None:
    """Complete the free of a block, if its request was served."""
    if block is not None:
        if block.allocated:
            sim.request_free(block)
        sim.complete(block)


def _serve(sim: Simulator, size: int, stream: int, pool: int, *, graph: bool) -> bool:
    """Whether a request that failed in the recording is served here. It is freed at once: the
    program's use of the memory is unknown."""
    block = request(sim, size, stream, pool, graph=graph)
    if block is None:
        return False
    sim.free(block)
    return True


def _release(
    sim: Simulator, events: EventColumns, pools_of: _Pools, index: int, *, flush: bool
) -> None:
    """Replay the release at ``index``; with ``flush``, it begins a release by the program."""
    pools, ids, _ = pools_of
    pool = pools[index]
    if pool:
        sim.release_pool(pool)  # torch returns memory only of private pools without an owner
    if flush:
        _flush(sim, events, pools, index, mem_pool=ids[pool][0] == 0)


def _flush(
    sim: Simulator, events: EventColumns, pools: Sequence[int], index: int, *, mem_pool: bool
) -> None:
    """Replay the release that begins at ``index``: of one pool that ends, or of all pools without
    an owner."""
    released = {pools[index]}
    at = index
    while at < len(events) and events.action[at] in (SEGMENT_FREE, SEGMENT_UNMAP):
        released.add(pools[at])
        at += 1
    for pool in released - {0}:
        sim.release_pool(pool)
    # The end of a `MemPool` releases its own cache.
    sim.empty_cache(pools[index] if mem_pool and len(released) == 1 else 0)


def _drop(sim: Simulator, pool: int, name: tuple[int, int]) -> None:
    """Remove the last owner of the pool. The end of a ``MemPool`` returns its cache, too."""
    sim.release_pool(pool)
    if name[0] == 0:
        sim.empty_cache(pool)


_CALLS = ("device_allocs", "device_frees", "retries", "ooms")


def request(
    sim: Simulator, size: int, stream: int, pool: int, *, graph: bool = False
) -> PoolBlock | None:
    """Allocate ``size`` bytes. In a graph's private pool this is part of a capture, during which
    nothing is released to make room."""
    if pool == 0:
        return sim.malloc(size, stream)
    sim.begin_capture(pool, frozenset({stream}) if graph else None)
    try:
        return sim.malloc(size, stream, pool)
    finally:
        sim.end_capture(pool)


def _allocate_old(sim: Simulator, state: StartState) -> dict[int, PoolBlock]:
    """Allocate the blocks from before the trace, lowest address first."""
    placed = [(old, part.stream, part.pool) for part in state.parts() for old in part.blocks]
    live = {}
    for old, stream, pool in [*placed, *((old, 0, 0) for old in state.unplaced)]:
        block = request(sim, old.requested, stream, pool)
        if block is not None:
            live[old.address] = block
            if old.pending:
                sim.request_free(block)
    return live


def search(
    trace: MemoryTrace, recorded: TraceReplay, *, capacity: int | None = None
) -> SettingsAdvice:
    """Try sensible settings and find the smallest change that helps.

    A change helps if it avoids the out-of-memory error of the recorded settings, or, if they have
    none, lowers the peak of reserved memory by at least 2% and 20 MiB in the worst address order.
    Two keys are recommended over one only if two fit and one does not, or if they gain 5% more.
    """
    baseline = what_if(trace, recorded, recorded.settings, capacity=capacity)
    singles = _candidates(recorded.settings)
    # One order first: the promising settings are then simulated in all orders.
    quick = [
        what_if(trace, recorded, s, capacity=capacity, orders=ADDRESS_ORDERS[:1]) for s in singles
    ]
    quick.sort(key=_rank)
    tried = [what_if(trace, recorded, o.settings, capacity=capacity) for o in quick[:4]]
    best = _best(baseline, tried)
    quick_pairs = [
        what_if(trace, recorded, settings, capacity=capacity, orders=ADDRESS_ORDERS[:1])
        for settings in _pairs(recorded.settings, [o.settings for o in quick[:4]])
    ]
    quick_pairs.sort(key=_rank)
    pairs = [what_if(trace, recorded, o.settings, capacity=capacity) for o in quick_pairs[:2]]
    best_pair = _best(baseline, pairs)
    if best_pair is not None and (best is None or _much_better(baseline, best, best_pair)):
        best = best_pair
    everything = [*tried, *quick[4:], *pairs, *quick_pairs[2:]]
    gain = 0
    if best is not None:
        gain = baseline.peak_reserved.least - best.peak_reserved.most
    return SettingsAdvice(
        baseline=baseline,
        tried=tuple(everything),
        best=best,
        gain=gain,
        fits=best is not None and baseline.would_oom > 0 and best.would_oom == 0,
    )


def _rank(outcome: WhatIfOutcome) -> tuple[int, int]:
    return outcome.would_oom, outcome.peak_reserved.most


def _best(baseline: WhatIfOutcome, outcomes: list[WhatIfOutcome]) -> WhatIfOutcome | None:
    """The best of the outcomes that help at all."""
    helping = [o for o in outcomes if _helps(baseline, o)]
    return min(helping, key=_rank, default=None)


def _helps(baseline: WhatIfOutcome, outcome: WhatIfOutcome) -> bool:
    if outcome.would_oom:
        return False
    if baseline.would_oom:
        return True
    gain = baseline.peak_reserved.least - outcome.peak_reserved.most
    return gain >= max(_WORTH_BYTES, _WORTH * baseline.peak_reserved.least)


def _much_better(baseline: WhatIfOutcome, single: WhatIfOutcome, pair: WhatIfOutcome) -> bool:
    more = single.peak_reserved.most - pair.peak_reserved.most
    return more >= max(_WORTH_BYTES, _WORTH_MORE * baseline.peak_reserved.least)


def _candidates(now: AllocatorSettings) -> list[AllocatorSettings]:
    """Every sensible change of one key that is not set already."""
    found = []
    if not now.expandable_segments:
        found.append(replace(now, expandable_segments=True))
    least = now.large_segment_size // MIB
    for megabytes in (20, 64, 128, 256, 512):
        if megabytes >= least:
            found.append(replace(now, max_split_size=megabytes * MIB))
    for divisions in (4, 8, 16):
        table = {1 << i: divisions for i in range(16)}
        found.append(replace(now, roundup_power2_divisions=table))
    if memory_fraction(now) < 1.0:
        found.extend(replace(now, garbage_collection_threshold=t) for t in (0.6, 0.8))
    for megabytes in (12, 32, 64):
        size = megabytes * MIB
        if now.max_split_size < 0 or now.max_split_size >= size:
            rounding = max(now.max_non_split_rounding, size)
            if now.max_non_split_rounding == now.large_segment_size:
                rounding = size
            found.append(replace(now, large_segment_size=size, max_non_split_rounding=rounding))
    on = to_conf(now)
    return [s for s in found if to_conf(s) != on]


def _pairs(now: AllocatorSettings, singles: list[AllocatorSettings]) -> list[AllocatorSettings]:
    """Combinations of two single changes to different keys."""
    fields = (
        "expandable_segments",
        "max_split_size",
        "roundup_power2_divisions",
        "garbage_collection_threshold",
        "large_segment_size",
    )

    def changed(settings: AllocatorSettings) -> str:
        return next(f for f in fields if getattr(settings, f) != getattr(now, f))

    found = []
    for at, first in enumerate(singles):
        for second in singles[at + 1 :]:
            key = changed(second)
            if key == changed(first):
                continue
            both = replace(first, **{key: getattr(second, key)})
            if key == "large_segment_size":
                both = replace(both, max_non_split_rounding=second.max_non_split_rounding)
            if 0 <= both.max_split_size < both.large_segment_size:
                continue  # torch refuses a max_split_size below the segment size
            found.append(both)
    return found


def reserved_alone(trace: MemoryTrace) -> int:
    """Peak reserved bytes of a trace's requests in an otherwise empty allocator.

    The blocks from before the trace are allocated first, the lowest address first."""
    sim = Simulator(trace.settings or AllocatorSettings(), SimulatedDriver())
    live: dict[int, PoolBlock] = {}

    def allocate(address: int, size: int, stream: int, pool: int) -> None:
        block = request(sim, size, stream, pool)
        if block is not None:
            live[address] = block

    before, events = trace.baseline, trace.events
    old = zip(
        before.address, before.size, before.column("stream"), before.column("pool"), strict=True
    )
    for row in sorted(old):
        allocate(*row)
    rows = zip(
        events.action,
        events.address,
        events.size,
        events.column("stream"),
        event_pools(trace),
        strict=True,
    )
    for code, address, size, stream, pool in rows:
        if code == ALLOC:
            allocate(address, size, stream, pool)
        elif code == FREE_COMPLETED:
            block = live.pop(address, None)
            if block is not None:
                sim.free(block)
    return sim.peak_reserved
