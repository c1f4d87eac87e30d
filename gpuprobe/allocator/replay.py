"""Replay: a recorded trace against the rules, event by event.

Each allocation goes through the simulator and must get the recorded address. The size of every
new segment, the order and place of every release and the final layout must match, too. An exact
replay proves that the rules, the settings and the start state are right for this program, on
which a what-if depends.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NoReturn, get_args

from gpuprobe.allocator.blocks import PoolBlock, TieRule, tie_rule_of
from gpuprobe.allocator.evidence import own_allocators, splitting
from gpuprobe.allocator.layout import load_layout, segments
from gpuprobe.allocator.rules import round_size
from gpuprobe.allocator.start_state import StartState, pool_indices, start_state
from gpuprobe.allocator.trace_simulator import Diverged, TraceSimulator, Unclear
from gpuprobe.errors import DataError, InternalError
from gpuprobe.model.actions import ALLOC, FREE_COMPLETED, FREE_REQUESTED, OOM, SNAPSHOT
from gpuprobe.model.io.files import gc_paused
from gpuprobe.model.memory import Block as BlockRow
from gpuprobe.model.memory import BlockState, Segment, TraceAction
from gpuprobe.model.text import human_bytes, plural
from gpuprobe.model.trace import AllocatorSettings, MemoryTrace

POOLS_NOT_RECORDED: Final = (
    "the torch that recorded the trace does not record which pool an event belongs to: requests "
    "that failed, and memory that was released before the end, count as the default pool's"
)
"""A note on replays of older traces with graphs or a ``MemPool``."""

SPLITTING_NOT_RECORDED: Final = (
    "a MemPool whose blocks were used one at a time may hand out whole ones (no_split): they "
    "count as split, and allocated memory may have been more"
)
"""A note on replays of traces that leave open whether a ``MemPool`` splits its blocks."""

_MAX_REPAIRS = 200  # of block sizes that the events leave open; each costs one more replay


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first place where rules and trace disagree.

    ``event`` is the index in the trace, or the number of events if the final layout differs.
    ``expected`` is what the rules do, ``observed`` what the trace shows.
    """

    event: int
    action: str
    expected: str
    observed: str
    why: str


@dataclass(frozen=True, slots=True)
class TraceReplay:
    """The replay of one device's trace. Sizes in bytes.

    If it is not ``exact``, the numbers describe the part before the divergence. ``flushes`` are the
    indices of the events that an ``empty_cache`` of the program, or the end of a pool, explains.
    ``tie_rule``: the order of equal free blocks, the first of ``tie_rules``, which are all that
    explain the trace. ``retries`` counts the certain ones: each release in ``unclear`` may be one
    more. ``overflows`` are allocations that a ``MemPool`` may have served when the default pool had
    no memory. ``held``: by pool, the last event that shows that its memory could not be returned.
    """

    device: str
    exact: bool
    first_divergence: Divergence | None
    events: int
    allocations: int
    peak_allocated: int
    peak_reserved: int
    active_at_peak: int
    final_allocated: int
    final_reserved: int
    device_allocs: int
    device_frees: int
    retries: int
    ooms: int
    complete: bool
    start_reserved: int
    memory_limit: int | None  # bytes that could be reserved, if an out-of-memory event shows it
    settings: AllocatorSettings
    step: int | None = None
    tie_rule: TieRule = "address"
    tie_rules: tuple[TieRule, ...] = ()
    notes: tuple[str, ...] = ()
    flushes: tuple[int, ...] = ()
    unclear: tuple[Unclear, ...] = ()  # of flushes and garbage collections: retries?
    overflows: tuple[Unclear, ...] = ()
    held: Mapping[int, int] = field(default_factory=dict)


@dataclass(slots=True)
class _Run:
    """One attempt."""

    sim: TraceSimulator
    start_reserved: int = 0
    allocations: int = 0
    divergence: Divergence | None = None
    tie_rules: tuple[TieRule, ...] = ()  # all that explain the trace
    chosen: tuple[int, int, int] | None = None  # hole that the rules took: address, size, needed
    notes: list[str] = field(default_factory=list)


def replay_trace(
    trace: MemoryTrace,
    settings: AllocatorSettings | None = None,
    device_memory: int | None = None,
    *,
    torch: str = "",
) -> TraceReplay:
    """Replay ``trace`` under ``settings`` (default: the recorded ones, else torch's).

    ``device_memory`` in bytes; only the address ranges of expandable segments depend on it.
    ``torch``: the version that recorded the trace, if known.
    """
    chosen = settings if settings is not None else trace.settings
    if chosen is None:
        chosen = AllocatorSettings()
    with gc_paused():  # a million short-lived blocks: collecting them costs a third of the time
        run = _best_run(trace, chosen, device_memory, torch)
    return _result(trace, chosen, run)


def _best_run(
    trace: MemoryTrace, settings: AllocatorSettings, device_memory: int | None, torch: str
) -> _Run:
    """The run that explains most of the trace, over the tie rules that may apply."""
    known = tie_rule_of(torch)
    rules: tuple[TieRule, ...] = get_args(TieRule) if known is None else (known,)
    best = _attempt(trace, settings, device_memory, rules[0])
    fitting = [rules[0]] if best.divergence is None else []
    for rule in rules[1:]:
        run = _attempt(trace, settings, device_memory, rule)
        if run.divergence is None:
            fitting.append(rule)
        if best.divergence is not None and (
            run.divergence is None or run.divergence.event > best.divergence.event
        ):
            best = run
    best.tie_rules = tuple(fitting)
    return best


def _attempt(
    trace: MemoryTrace,
    settings: AllocatorSettings,
    device_memory: int | None,
    tie_rule: TieRule,
) -> _Run:
    """Replay; if a block whose size the events leave open causes a divergence, enlarge it and
    replay again."""
    state = start_state(trace, settings, device_memory)
    repairs = 0
    while True:
        run = _run(trace, settings, state, device_memory, tie_rule)
        if run.divergence is None or run.chosen is None:
            break
        address, size, needed = run.chosen
        if repairs == _MAX_REPAIRS or not _shrink_hole(state, address, size, needed):
            break
        repairs += 1
    if repairs:
        run.notes.append(
            f"{repairs} block sizes from before the trace were inferred from later allocations"
        )
    if state.unplaced:
        run.notes.append(
            f"in no known segment: {plural(len(state.unplaced), 'block')} from before the trace"
        )
    return run


def _shrink_hole(state: StartState, address: int, size: int, needed: int) -> bool:
    """Enlarge the block before the hole at ``address``, which the rules took for ``needed`` bytes
    and the trace did not, so that the hole is too small. False if the block's size is certain."""
    for segment in state.segments:
        if not segment.address <= address < segment.address + segment.size:
            continue
        for block in segment.blocks:
            if block.address + block.size == address and block.address in state.open_slack:
                more = size - needed + 512
                if more > state.open_slack[block.address]:
                    return False
                state.open_slack[block.address] -= more
                block.size += more
                return True
    return False


def _run(
    trace: MemoryTrace,
    settings: AllocatorSettings,
    state: StartState,
    device_memory: int | None,
    tie_rule: TieRule,
) -> _Run:
    events = trace.events
    pools = event_pools(trace)
    sim = TraceSimulator(
        settings,
        events,
        pools,
        {index: pool for pool, index in pool_indices(trace).items()},
        device_memory=device_memory,
        tie_rule=tie_rule,
    )
    for index in own_allocators(trace, settings, pools):
        sim.pool(index).own_allocator = True
    traits = splitting(trace, settings, pools)
    for index in traits.whole:
        sim.pool(index).no_split = True
    run = _Run(sim)
    if traits.open_sizes:
        run.notes.append(SPLITTING_NOT_RECORDED)
    try:
        load_layout(sim, state.segments, state.ranges)
    except DataError as error:
        run.divergence = Divergence(
            0, "start state", "has no such layout", str(error), "the trace contradicts itself"
        )
        return run
    run.start_reserved = sim.reserved
    if tie_rule != "address" and sim.orders:
        sim.ties.unknown = sim.orders
        sim.plain_search = False
    sim.trust_ages = not any(half.free_blocks() for half in sim.halves())
    try:
        run.allocations = _drive(trace, sim, pools)
        _check_layout(trace, sim)
    except Diverged as diverged:
        index = diverged.index
        action = "final layout"
        if index < len(events):
            action = TraceAction.from_code(events.action[index]).value
        run.divergence = Divergence(index, action, diverged.rules, diverged.trace, diverged.why)
        block = diverged.block
        if block is not None and 0 <= sim.at_event < len(events):
            hole = block.size
            rest = block.next
            if rest is not None and rest.mapped and not rest.active:
                hole += rest.size
            needed = round_size(events.size[sim.at_event], settings)
            run.chosen = (block.address, hole, needed)
    except (InternalError, KeyError) as error:
        # A trace with two segments at one address, which no driver allocates, breaks the layout.
        at = max(sim.at_event, 0)
        action = TraceAction.from_code(events.action[at]).value
        run.divergence = Divergence(
            at, action, "cannot continue", str(error), "the trace contradicts itself"
        )
    return run


def _drive(trace: MemoryTrace, sim: TraceSimulator, pools: Sequence[int]) -> int:
    """Replay all events, in the hot loop of replay. Returns the number of allocations."""
    events = trace.events
    live = sim.live
    malloc = sim.malloc
    complete = sim.complete
    waiting = False
    freed = None
    allocations = 0
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
            reserved = sim.reserved
            if waiting:
                block = sim.malloc_in_batch(index, size, stream, pool)
                waiting = False
            else:
                sim.at_event = index
                block = malloc(size, stream, pool)
            freed = None
            if block is None or block.address != address:
                _wrong_place(trace, sim, index, block)
            if pool:
                sim.note_pool(index, block, pool, cached=sim.reserved == reserved)
            allocations += 1
        elif code == FREE_REQUESTED:
            if waiting:
                sim.settle(index)
                waiting = False
            freed = live.get(address)
            if freed is None or not freed.allocated or freed.requested != size:
                _wrong_free(index, freed, address, size)
            freed.allocated = False
            sim.allocated -= freed.size
        elif code == FREE_COMPLETED and freed is not None and freed.address == address:
            # No other stream used the block: its free completes at once.
            complete(freed)
            sim.recent[:] = (freed.address,)
            freed = None
        elif code == SNAPSHOT:
            sim.settle(index)
            waiting = False
        elif code == OOM:
            _fail(sim, index, size, stream, pool)
            waiting = False
            freed = None
        else:
            sim.add(index)
            waiting = True
            freed = None
    sim.settle(len(events))
    return allocations


def _fail(sim: TraceSimulator, index: int, size: int, stream: int, pool: int) -> None:
    """Replay a request that ran out of memory."""
    if sim.malloc_in_batch(index, size, stream, pool) is not None:
        raise Diverged(
            index,
            f"finds room for {human_bytes(size)}",
            "is out of memory",
            "a cached block fits by the rules",
        )
    sim.learn_limit(index)


def _wrong_free(index: int, block: PoolBlock | None, address: int, size: int) -> NoReturn:
    """Raise Diverged for a free that does not match the block at its address."""
    if block is None or not block.allocated:
        raise Diverged(
            index,
            "has no allocated block there",
            f"frees the block at {address:#x}",
            "the block was never allocated, or was freed already",
        )
    raise Diverged(
        index,
        f"has a block of {block.requested} requested bytes there",
        f"frees {size} requested bytes at {address:#x}",
        "the sizes of an allocation and its free differ",
    )


def _wrong_place(
    trace: MemoryTrace, sim: TraceSimulator, index: int, block: PoolBlock | None
) -> NoReturn:
    """Raise Diverged for an allocation that went elsewhere, saying why as far as is known."""
    events = trace.events
    address, size = events.address[index], events.size[index]
    recorded = f"allocates {human_bytes(size)} at {address:#x}"
    if block is None:
        raise Diverged(index, "is out of memory", recorded, "no room by the rules")
    rules = f"allocates it at {block.address:#x}"
    there = sim.live.get(address)
    if there is not None:
        why = "the recorded address is still in use by the rules"
    else:
        why = _why_not(sim, block, address)
    raise Diverged(index, rules, recorded, why, block)


def _why_not(sim: TraceSimulator, chosen: PoolBlock, address: int) -> str:
    """Why the rules did not choose the recorded address, as far as they know that place."""
    hole = chosen.size
    rest = chosen.next
    if rest is not None and rest.mapped and not rest.active:
        hole += rest.size
    for half in sim.halves():
        for block in half.free_blocks():
            if block.address <= address < block.address + block.size:
                if block.address != address:
                    return (
                        "the recorded address is inside a free block, and an allocation "
                        "always starts at a block's low end"
                    )
                if block.size == hole:
                    return "two free blocks fit equally well, and the order differs"
                there, here = human_bytes(block.size), human_bytes(hole)
                return f"the free block there has {there}, the one the rules take {here}"
    return "the rules know no free block at the recorded address"


def event_pools(trace: MemoryTrace) -> Sequence[int]:
    """The pool index of every event; in older traces, which lack pool ids, from the layout."""
    column = trace.events.column("pool")
    private = [s for s in trace.segments if s.pool_id != (0, 0)]
    if not private or any(column):
        return column
    indices = pool_indices(trace)
    private.sort(key=lambda segment: segment.address)
    starts = [segment.address for segment in private]
    found = []
    for address in trace.events.address:
        at = bisect_right(starts, address) - 1
        inside = at >= 0 and address < starts[at] + private[at].total_size
        found.append(indices[private[at].pool_id] if inside else 0)
    return found


def _lacks_pools(trace: MemoryTrace) -> bool:
    """Whether events do not name their pools: none has one, and the settings lack a key that torch
    added to snapshots after pools (``max_cached_size``)."""
    settings = trace.settings
    recent = settings is not None and "max_cached_size" in settings.extra
    return not recent and not any(trace.events.column("pool"))


def _check_layout(trace: MemoryTrace, sim: TraceSimulator) -> None:
    """Compare the layout after the last event with the recorded one. Raises Diverged."""
    if not trace.segments:
        return
    indices = pool_indices(trace)
    ids = {index: pool for pool, index in indices.items()}
    names = [ids.get(i, (0, i)) for i in range(max(*ids, 0) + 1)]
    ours = {s.address: s for s in segments(sim, names)}
    end = len(trace.events)
    for theirs in sorted(trace.segments, key=lambda s: s.address):
        mine = ours.pop(theirs.address, None)
        where = f"a segment at {theirs.address:#x} of {human_bytes(theirs.total_size)}"
        if mine is None:
            raise Diverged(end, "has none there", f"has {where}", "a segment is missing")
        difference = _difference(mine, theirs)
        if difference is not None:
            raise Diverged(end, difference[0], difference[1], f"the blocks differ in {where}")
    if ours:
        extra = min(ours.values(), key=lambda s: s.address)
        raise Diverged(
            end,
            f"has a segment at {extra.address:#x} of {human_bytes(extra.total_size)}",
            "has none there",
            "a segment is left over",
        )


def _difference(mine: Segment, theirs: Segment) -> tuple[str, str] | None:
    """The first difference between two segments as (ours, theirs); None if they are equal."""
    for name in ("total_size", "stream", "segment_type", "pool_id", "is_expandable"):
        a, b = getattr(mine, name), getattr(theirs, name)
        if a != b:
            return f"has {name} {a}", f"has {name} {b}"
    ours = [_block_key(block) for block in mine.blocks]
    recorded = [_block_key(block) for block in theirs.blocks]
    for a_key, b_key in zip(ours, recorded, strict=False):
        if a_key != b_key:
            return f"has block {_shown(a_key)}", f"has block {_shown(b_key)}"
    if len(ours) != len(recorded):
        return f"has {plural(len(ours), 'block')}", f"has {plural(len(recorded), 'block')}"
    return None


def _block_key(block: BlockRow) -> tuple[int, int, str, int]:
    # Torch keeps the last request's size on a free block: only active ones count.
    active = block.state is not BlockState.INACTIVE
    return block.address, block.size, block.state.value, block.requested_size if active else 0


def _shown(key: tuple[int, int, str, int]) -> str:
    return f"{key[0]:#x} of {key[1]} bytes, {key[2]}, {key[3]} requested"


def _result(trace: MemoryTrace, settings: AllocatorSettings, run: _Run) -> TraceReplay:
    sim = run.sim
    notes = list(run.notes)
    if sim.ties.learnt:
        notes.append(
            f"{sim.ties.learnt} ties between equal blocks from before the trace were decided "
            "as the trace did: their order of registration is not recorded"
        )
    exact = run.divergence is None
    if not trace.complete:
        notes.append(
            "the recorder's buffer overflowed and the earliest events are lost: the replay "
            "starts at the first kept event"
        )
    if not trace.segments and len(trace.events):
        notes.append("the trace has no final layout; only its events were checked")
    if sim.gc_enabled and not sim.trust_ages:
        notes.append(
            "the ages of cached segments are unknown (some are from before the trace, or the "
            "memory limit changed): the choices of garbage collection were not checked"
        )
    if sim.unclear:
        notes.append(
            f"{len(sim.unclear)} releases of cached memory may have been an allocation's that then "
            "tried again: they look the same"
        )
    if _lacks_pools(trace) and (run.divergence is not None or sim.ooms or sim.private_pools):
        notes.append(POOLS_NOT_RECORDED)
    if run.divergence is not None:
        notes.append("numbers cover only the events before the divergence")
    return TraceReplay(
        device=trace.device,
        exact=exact,
        first_divergence=run.divergence,
        events=len(trace.events),
        allocations=run.allocations,
        peak_allocated=sim.peak_allocated,
        peak_reserved=sim.peak_reserved,
        active_at_peak=sim.active_at_peak,
        final_allocated=sim.allocated,
        final_reserved=sim.reserved,
        device_allocs=sim.device_allocs,
        device_frees=sim.device_frees,
        retries=sim.retries,
        ooms=sim.ooms,
        complete=trace.complete,
        start_reserved=run.start_reserved,
        memory_limit=sim.memory_limit,
        settings=settings,
        step=trace.step,
        tie_rule=sim.tie_rule,
        tie_rules=run.tie_rules,
        notes=tuple(notes),
        flushes=tuple(sim.flushes),
        unclear=tuple(sim.unclear),
        overflows=tuple(sim.overflows),
        held=sim.held,
    )
