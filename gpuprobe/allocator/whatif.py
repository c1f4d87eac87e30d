"""What-if: the requests of a trace under other allocator settings.

The program's requests (sizes, streams, pools, the order of allocations and frees, and its calls
of ``empty_cache``) are kept; where memory lands is simulated anew. What a real run would do
differently and this cannot know: addresses, which are simulated in several orders; the history
before the trace, which is replaced by re-allocating what was alive, lowest address first, into
an empty allocator; and a program that reacts to memory pressure.

Because of the second point every number is compared with the recorded settings simulated in
the same way, not with the recording itself.

Some of what the program did is not in a recording, and may matter under other settings: it is
simulated in each way that it can have been (`_readings`), and where that changes a figure, the
outcome says so.
"""

from __future__ import annotations

import gc
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple

from gpuprobe.allocator.blocks import PoolBlock, TieRule
from gpuprobe.allocator.driver import ADDRESS_ORDERS, SimulatedDriver
from gpuprobe.allocator.evidence import own_allocators, splitting
from gpuprobe.allocator.replay import TraceReplay, event_pools
from gpuprobe.allocator.rules import MIB, round_size
from gpuprobe.allocator.settings import differences, memory_fraction, to_conf
from gpuprobe.allocator.simulator import Simulator
from gpuprobe.allocator.start_state import StartState, pool_indices, start_state
from gpuprobe.model.memory import TraceAction
from gpuprobe.model.trace import AllocatorSettings, EventColumns, MemoryTrace

_ALLOC: Final = TraceAction.ALLOC.code
_FREE_REQUESTED: Final = TraceAction.FREE_REQUESTED.code
_FREE_COMPLETED: Final = TraceAction.FREE_COMPLETED.code
_SEGMENT_FREE: Final = TraceAction.SEGMENT_FREE.code
_UNMAP: Final = TraceAction.SEGMENT_UNMAP.code
_OOM: Final = TraceAction.OOM.code

LIMITS: Final = (
    "calls of empty_cache that released nothing leave no trace: they are left out",
    "addresses of new segments are simulated: results that depend on their order are ranges over "
    "several orders",
    "blocks alive before the trace are re-allocated first, lowest address first, into an empty "
    "allocator: memory cached before the trace is ignored",
    "the program is assumed to request the same memory in the same order",
)
"""What every what-if leaves out; printed with its numbers."""

_WORTH = 0.02
_WORTH_BYTES = 20 * MIB
_WORTH_MORE = 0.05


@dataclass(frozen=True, slots=True)
class Range:
    """A number that may depend on the order of addresses: its least and its most."""

    least: int
    most: int

    @property
    def exact(self) -> bool:
        return self.least == self.most


@dataclass(frozen=True, slots=True)
class WhatIfOutcome:
    """What some settings would have done. Sizes in bytes, calls counted within the trace.

    ``fragmentation`` is in millionths: the part of reserved memory that was not in use when
    reserved memory first reached its peak. ``would_oom``: number of address orders, out of
    ``orders``, in which a request failed that the recording served. ``undecided``: what the
    recording does not tell, and figures depend on: their ranges have each way it can have been.
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
    """The smallest change that helps, or ``best`` None where nothing tried does.

    ``gain`` is what peak reserved shrinks by, in the worst address order. ``fits``: the
    recorded settings run out of memory at the capacity and this change does not.
    """

    baseline: WhatIfOutcome
    tried: tuple[WhatIfOutcome, ...]
    best: WhatIfOutcome | None
    gain: int
    fits: bool


@dataclass(slots=True)
class _Measured:
    """One simulation: ``figures`` by the name that they have in `WhatIfOutcome`."""

    figures: dict[str, int]
    failed: int


@dataclass(frozen=True, slots=True)
class _Reading:
    """One way in which the program can have made the recording.

    ``flushes``: the events at which it released cached memory. ``dropped``: by event, the pools
    that are released after it. ``whole``: pools whose blocks are not split. ``overflow``: pools
    that serve when the default pool has no memory; they did so at ``overflows``. ``least``: what
    failed were the smallest requests that were recorded as these. ``tie_rule``: of its torch.
    """

    flushes: frozenset[int]
    whole: frozenset[int]
    dropped: Mapping[int, Sequence[int]] = field(default_factory=dict)
    overflow: frozenset[int] = frozenset()
    overflows: frozenset[int] = frozenset()
    least: bool = False
    tie_rule: TieRule = "address"


class _Pools(NamedTuple):
    """The pool index of every event, torch's id of each index, and the pools with an allocator of
    their own.
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
_ASKED_FOR: Final = "which releases of cached memory were the program's own"
_TIES: Final = "which version of torch ran: of equal free blocks, each takes another"
_ROUNDED: Final = "the size of requests that failed: it was recorded rounded"


def _readings(
    trace: MemoryTrace,
    recorded: TraceReplay,
    pools_of: _Pools,
    settings: AllocatorSettings,
    capacity: int | None,
) -> tuple[_Reading, list[tuple[str, _Reading]]]:
    """The usual reading of a recording, and for each question that it leaves open the other one."""
    events, (pools, ids, _) = trace.events, pools_of
    most = None if capacity is None else int(memory_fraction(recorded.settings) * capacity)
    flushes = frozenset(recorded.flushes)
    unclear = frozenset(one.event for one in recorded.unclear)
    if most is not None:
        # The allocation made the room itself: it would not have fitted otherwise.
        own = frozenset(one.event for one in recorded.unclear if one.needed > most)
        flushes, unclear = flushes - own, unclear - own
    whole, either, _ = splitting(trace, recorded.settings, pools)
    usual = _Reading(flushes, whole, tie_rule=recorded.tie_rule)
    others: list[tuple[str, _Reading]] = []
    if unclear - flushes:
        others.append((_ASKED_FOR, replace(usual, flushes=flushes | unclear)))
    if most is None and unclear & flushes:
        others.append((_ASKED_FOR, replace(usual, flushes=flushes - unclear)))
    for rule in recorded.tie_rules[1:]:
        others.append((_TIES, replace(usual, tie_rule=rule)))
    private = {pool for pool in pools if pool}
    if private:
        last = dict(recorded.held)
        for index, code, pool in zip(range(len(events)), events.action, pools, strict=True):
            if pool and code in (_ALLOC, _OOM):
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
    failed = {size for size, code in zip(events.size, events.action, strict=True) if code == _OOM}
    if any(
        round_size(_least(size, recorded.settings), settings) != round_size(size, settings)
        for size in failed
    ):
        others.append((_ROUNDED, replace(usual, least=True)))
    return usual, others


def _least(size: int, settings: AllocatorSettings) -> int:
    """The smallest request that is rounded up to ``size``."""
    return bisect_left(range(size), size, key=lambda asked: round_size(asked, settings))


def what_if(
    trace: MemoryTrace,
    recorded: TraceReplay,
    settings: AllocatorSettings,
    *,
    capacity: int | None = None,
    orders: Sequence[str] = ADDRESS_ORDERS,
) -> WhatIfOutcome:
    """The trace under ``settings``, on a device with ``capacity`` bytes for the allocator
    (None: unlimited). ``recorded`` is the replay that found where ``empty_cache`` was called.
    """
    was_enabled = gc.isenabled()
    gc.disable()  # see replay_trace
    try:
        state = start_state(trace, recorded.settings)
        pools = _pools(trace, recorded.settings)
        usual, others = _readings(trace, recorded, pools, settings, capacity)

        def run(reading: _Reading, order: str) -> _Measured:
            return _simulate(trace, recorded, pools, reading, state, settings, capacity, order)

        runs = [run(usual, order) for order in orders]
        read = [run(reading, orders[0]) for _, reading in others]
    finally:
        if was_enabled:
            gc.enable()
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
    pools, ids, own = pools_of
    sim = Simulator(
        settings,
        SimulatedDriver(capacity, order),
        device_memory=capacity,
        tie_rule=reading.tie_rule,
    )
    for index in reading.whole:
        sim.pool(index).no_split = True
    for index in own:
        sim.pool(index).own_allocator = True
    for index in reading.overflow:
        sim.pool(index).use_on_oom = True
    live = _allocate_old(sim, state)
    old = len(state.homeless) + sum(len(part.blocks) for part in state.parts())
    failed = old - len(live)
    before = {name: getattr(sim, name) for name in _CALLS}
    served = 0
    events = trace.events
    # Recorded address -> where the block is now. A request that failed has no entry: its
    # free is skipped too.
    for index, code, address, size, stream, pool in zip(
        range(len(events)),
        events.action,
        events.address,
        events.size,
        events.column("stream"),
        pools,
        strict=True,
    ):
        if code == _ALLOC:
            if index in reading.overflows:
                pool = 0
            block = request(sim, size, stream, pool, graph=ids[pool][0] > 0)
            if block is None:
                failed += 1
            else:
                live[address] = block
        elif code == _FREE_REQUESTED:
            block = live.get(address)
            if block is not None and block.allocated:  # a damaged trace may free it again
                sim.request_free(block)
        elif code == _FREE_COMPLETED:
            block = live.pop(address, None)
            if block is not None:
                if block.allocated:
                    sim.request_free(block)
                sim.complete(block)
        elif code == _OOM:
            if reading.least:
                size = _least(size, recorded.settings)
            block = request(sim, size, stream, pool, graph=ids[pool][0] > 0)
            if block is not None:
                # What the program would have done with it is not known: it gives it back.
                served += 1
                sim.free(block)
        elif code in (_SEGMENT_FREE, _UNMAP):
            if pool:
                sim.release_pool(pool)  # torch returns the memory of such pools alone
            if index in reading.flushes:
                _flush(sim, events, pools, index, mem_pool=ids[pool][0] == 0)
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


def _flush(
    sim: Simulator, events: EventColumns, pools: Sequence[int], index: int, *, mem_pool: bool
) -> None:
    """The release that begins at ``index``: of one pool as it ends, or of all released pools."""
    released = {pools[index]}
    at = index
    while at < len(events) and events.action[at] in (_SEGMENT_FREE, _UNMAP):
        released.add(pools[at])
        at += 1
    for pool in released - {0}:
        sim.release_pool(pool)
    # The end of a `MemPool` gives back its own cache.
    sim.empty_cache(pools[index] if mem_pool and len(released) == 1 else 0)


def _drop(sim: Simulator, pool: int, name: tuple[int, int]) -> None:
    """The last owner of the pool goes. The end of a ``MemPool`` returns its cache, too."""
    sim.release_pool(pool)
    if name[0] == 0:
        sim.empty_cache(pool)


_CALLS = ("device_allocs", "device_frees", "retries", "ooms")


def request(
    sim: Simulator, size: int, stream: int, pool: int, *, graph: bool = False
) -> PoolBlock | None:
    """One allocation. Into a graph's own pool it is within a capture: nothing is released to make
    room then."""
    if pool == 0:
        return sim.malloc(size, stream)
    sim.begin_capture(pool, frozenset({stream}) if graph else None)
    try:
        return sim.malloc(size, stream, pool)
    finally:
        sim.end_capture(pool)


def _allocate_old(sim: Simulator, state: StartState) -> dict[int, PoolBlock]:
    """Allocate what was alive before the trace, lowest address first."""
    housed = [(old, part.stream, part.pool) for part in state.parts() for old in part.blocks]
    live = {}
    for old, stream, pool in [*housed, *((old, 0, 0) for old in state.homeless)]:
        block = request(sim, old.requested, stream, pool)
        if block is not None:
            live[old.address] = block
            if old.pending:
                sim.request_free(block)
    return live


def search(
    trace: MemoryTrace, recorded: TraceReplay, *, capacity: int | None = None
) -> SettingsAdvice:
    """Try the sensible settings and find the smallest change that helps.

    Helping means: no out-of-memory where the recorded settings have one, else a peak of
    reserved memory at least 2% and 20 MiB lower in the worst address order. Two keys are
    advised over one only where they fit and one does not, or gain 5% more.
    """
    baseline = what_if(trace, recorded, recorded.settings, capacity=capacity)
    singles = _candidates(recorded.settings)
    # One order for the first look: the promising ones are then run under all.
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
    """Every sensible change of one key, none of them on already."""
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
    """The most that is reserved, in bytes: what was alive before the trace is allocated first, the
    lowest address first, then come the events."""
    sim = Simulator(trace.settings or AllocatorSettings(), SimulatedDriver())
    live: dict[int, PoolBlock] = {}

    def made(address: int, size: int, stream: int, pool: int) -> None:
        block = request(sim, size, stream, pool)
        if block is not None:
            live[address] = block

    before, events = trace.baseline, trace.events
    old = zip(
        before.address, before.size, before.column("stream"), before.column("pool"), strict=True
    )
    for row in sorted(old):
        made(*row)
    rows = zip(
        events.action,
        events.address,
        events.size,
        events.column("stream"),
        event_pools(trace),
        strict=True,
    )
    for code, address, size, stream, pool in rows:
        if code == TraceAction.ALLOC.code:
            made(address, size, stream, pool)
        elif code == TraceAction.FREE_COMPLETED.code:
            block = live.pop(address, None)
            if block is not None:
                sim.free(block)
    return sim.peak_reserved
