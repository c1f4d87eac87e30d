"""Happens-before over streams and the host.

Each stream has a clock: the number of operations of each other stream that its newest operation is
ordered after. The host is an actor like a stream: a launch is ordered after what the host has
waited for, and the host's clock takes a stream's value when it synchronizes. Two accesses are
ordered if the later one's clock includes the earlier one when it is launched. Sources: the CUDA
programming guide on streams and events, torch's notes on CUDA semantics.

Blocks: the next owner of a freed block's bytes inherits what was done to them, and it is checked
at that owner's first access, not at the free. A wait takes an event's value at its record.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, Final, TypeAlias

from gpuprobe.hazards import events, rules
from gpuprobe.hazards.accesses import (
    FEW,
    Access,
    Race,
    RaceContext,
    Sync,
    TrackedBlock,
    coarser,
    rule_of,
)
from gpuprobe.hazards.events import ADDED, HOST, Event, Launch, Site
from gpuprobe.hazards.footprint import Footprint, overlap
from gpuprobe.hazards.freed import FreedBytes, LatentReuse
from gpuprobe.hazards.log import EventLog
from gpuprobe.hazards.untracked import untrack
from gpuprobe.model.rules import Rule

_PLACES: Final = 2048
"""Places of one block that are kept apart; beyond, neighbours are merged."""
_new: Final = tuple.__new__  # half the time of calling a named tuple's class


class LegacyDefault:
    """Which actors wait for each other because of the legacy default stream of a device.

    Before anything is queued on it, it waits for all blocking streams, and they wait for it: those
    created without ``cudaStreamNonBlocking``. Streams of torch's pools are not blocking.
    ``blocking`` returns, by device and number, whether a stream is. Source: the CUDA runtime API,
    "Stream synchronization behavior".
    """

    def __init__(self) -> None:
        self.blocking: Callable[[int, int], bool] | None = None
        self._blocking: dict[int, set[int]] = {}  # actors by device
        self._defaults: dict[int, int] = {}

    def __bool__(self) -> bool:
        return bool(self._blocking)

    def add(self, actor: int, device: int, number: int) -> None:
        """Add the actor of a stream."""
        if number == 0:
            self._defaults[device] = actor
        elif self.blocking is not None and self.blocking(device, number):
            self._blocking.setdefault(device, set()).add(actor)

    def before(self, actor: int, device: int) -> Collection[int]:
        """The actors that an actor on this device waits for before anything is queued on it."""
        blocking = self._blocking.get(device, ())
        default = self._defaults.get(device)
        if actor == default:
            return blocking
        return (default,) if actor in blocking and default is not None else ()


class Engine:
    """Checks a run, event by event. ``keep_log`` keeps the events in an `EventLog`, so that a fix
    can be verified by replaying them.
    """

    def __init__(self, *, keep_log: bool = True) -> None:
        self._actors: dict[tuple[int, int], int] = {}
        self.names: list[tuple[int, int]] = [(-1, -1)]  # device and number, by actor
        # Positions in torch's pool, for messages, of streams whose number is a handle.
        self.labels: dict[tuple[int, int], int] = {}
        self.many_streams = False
        """Whether more than one stream has done anything."""
        self._clocks: list[list[int]] = [[0]]
        self._blocks: dict[int, TrackedBlock] = {}
        self._freed = FreedBytes()
        self._events: dict[int, tuple[list[int], Sync]] = {}
        self._signals: dict[int, list[int]] = {}  # events that libraries record themselves
        self._latent = LatentReuse()
        self._freed_captured: dict[tuple[int, int], Site] = {}  # by graph and address: where
        self._syncs: deque[Sync] = deque(maxlen=256)
        self._reported: set[tuple[Any, ...]] = set()
        self.races: list[Race] = []
        self._idle_waits: dict[Site, int] = {}  # by place: waits that ordered nothing new
        self._useful: set[Site] = set()  # places of other waits
        self.self_waits: list[Sync] = []
        self.operations = 0
        self.unknown_events = 0
        self._log = EventLog() if keep_log else None
        self.replays = False  # a log: each race is reported, not each pair of sites
        # The program's names for the tensors that a place uses on another stream than their own.
        self.tensor_names: dict[Site, tuple[str, ...]] = {}
        self.legacy = LegacyDefault()
        self.context: Callable[[int, int, int], RaceContext] | None = None  # called at each race

    def apply(self, event: Event) -> None:
        """Check an event, and append it to the log."""
        if self._log is not None:
            self._log.add(event)
        _HANDLERS[type(event)](self, event)

    # -- actors and clocks

    def stream(self, device: int, number: int) -> int:
        """The actor of a stream, created at its first use."""
        key = (device, number)
        found = self._actors.get(key)
        if found is None:
            found = self._actors[key] = len(self.names)
            self.legacy.add(found, device, number)
            self.names.append(key)
            for clock in self._clocks:
                clock.append(0)
            self._clocks.append([0] * (found + 1))
            self.many_streams = found > 1
        return found

    def _merge(self, into: int, clock: Sequence[int]) -> bool:
        """Advance an actor's clock to ``clock``. False if there was nothing new in it."""
        mine = self._clocks[into]
        news = False
        for at, time in enumerate(clock):
            if time > mine[at]:
                mine[at] = time
                news = True
        return news

    def _barrier(self, actor: int) -> None:
        device, _ = self.names[actor]
        for other in self.legacy.before(actor, device):
            self._merge(actor, self._clocks[other])

    def _time(self, actor: int) -> int:
        """The number of operations that an actor has done."""
        return self._clocks[actor][actor]

    def _tick(self, actor: int) -> int:
        """Count one more operation of an actor; return its time."""
        clock = self._clocks[actor]
        clock[actor] += 1
        return clock[actor]

    # -- memory

    def _allocation(self, event: events.Allocation) -> None:
        address, size, owner, private = event
        block = self._blocks[address] = TrackedBlock(address, size, owner, private)
        block.inherited = self._freed.take(address, size)
        if self._latent and owner > 0 and not private:
            block.reusable = self._latent.candidates(block, self._clocks[owner])

    def is_live(self, address: int) -> bool:
        """Whether a live block begins at ``address``."""
        return address in self._blocks

    def block(self, address: int) -> TrackedBlock | None:
        """The live block at ``address``."""
        return self._blocks.get(address)

    def end_matters(self, address: int) -> bool:
        """Whether a report may have to name the place where the block at ``address`` is freed: a
        captured graph uses it, or another stream still does.
        """
        block = self._blocks.get(address)
        if block is None:
            return False
        return bool(block.graphs) or (self.many_streams and self._in_use(block))

    def foreign(self, address: int, actor: int) -> bool:
        """Whether a block was allocated on another stream than ``actor``."""
        block = self._blocks.get(address)
        return block is not None and block.owner not in (-1, actor)

    def allocated(self, address: int, site: Site) -> None:
        """Set the place where a block was allocated, if no launch shows it."""
        block = self._blocks.get(address)
        if block is not None:
            block.history.allocated = site

    def _in_use(self, block: TrackedBlock) -> bool:
        """Whether another stream than the block's own uses it in a way that the host has not waited
        for.
        """
        host = self._clocks[HOST]
        return any(
            host[access.actor] < access.time and access.actor != block.owner
            for access in block.uses()
        )

    def _free(self, event: events.Free) -> None:
        address, site, waits = event
        block = self._blocks.pop(address, None)
        if block is None:
            return
        for graph in block.graphs:
            self._freed_captured[(graph, address)] = site
        if waits:
            return
        host = self._clocks[HOST]
        block.history.freed = site
        # A block that was never touched passes on what it had inherited itself.
        kept = [
            access
            for access in (*block.writes, *block.reads, *block.inherited)
            if host[access.actor] < access.time
        ]
        for actor in block.recorded:
            clock = self._clocks[actor]
            kept = [access for access in kept if clock[access.actor] < access.time]
        if kept:
            untrack(kept)
            self._freed.add(address, block.size, kept)
            # Only other streams can use memory after it could have been reused.
            if block.owner > 0 and self.many_streams and not block.private:
                self._latent.add(block, kept, self._clocks[block.owner])

    def at_end(self) -> None:
        """Report what is still latent at the end of a check (see `LatentReuse`)."""
        for block, access in self._latent.at_end(self._clocks[HOST], self._clocks):
            freed = None if access.history is None else access.history.freed
            time = self._time(block.owner)
            owner = Access(block.owner, time, access.where, True, "free", freed)
            self._race(rules.LATENT, access, owner, block)

    def _record_stream(self, event: events.RecordStream) -> None:
        block = self._blocks.get(event.address)
        if block is not None and event.actor != block.owner:
            block.recorded |= {event.actor}

    def _forget_stream(self, event: events.ForgetStream) -> None:
        block = self._blocks.get(event.address)
        if block is not None:
            block.recorded -= {event.actor}

    # -- work

    def _launch(self, event: Launch) -> None:
        actor, op, accesses, site, note = event
        self.operations += 1
        if self.legacy:
            self._barrier(actor)
        clock = self._clocks[actor]
        for at, done in enumerate(self._clocks[HOST]):
            if done > clock[at]:
                clock[at] = done
        time = clock[actor] = clock[actor] + 1
        for address, where, write in accesses:
            block = self._blocks.get(address) or self._from_before(address)
            access = _new(Access, (actor, time, where, write, op, site, note, block.history))
            untrack(access)
            self._access(block, access, clock)

    def _publication(self, event: events.Publication) -> None:
        actor, op, accesses, site = event
        time = self._tick(actor)
        for address, where, _ in accesses:
            block = self._blocks.get(address)
            if block is not None:
                write = Access(actor, time, where, True, op, site, "gradient", block.history)
                block.writes.append(write)

    def _graph_capture(self, event: events.GraphCapture) -> None:
        graph, addresses = event
        for address in addresses:
            block = self._blocks.get(address)
            if block is None:  # freed within the capture
                self._freed_captured[(graph, address)] = None
            else:
                block.graphs = (*block.graphs, graph)

    def _graph_replay(self, event: events.GraphReplay) -> None:
        """Blocks that were freed since the capture are reported, and not checked further."""
        graph, actor, accesses, site = event
        freed = self._freed_captured
        live = [
            (address, where, write)
            for address, where, write in accesses
            if (graph, address) not in freed
        ]
        self._launch(Launch(actor, "replay", live, site, "graph"))
        time = self._time(actor)
        for address, where, write in accesses:
            if (graph, address) in freed:
                end = Access(HOST, 0, where, True, "free", freed[(graph, address)], "graph")
                replayed = Access(actor, time, where, write, "replay", site, "graph")
                self._race(rules.GRAPH_FREED, end, replayed, TrackedBlock(address, 0))

    def _host_access(self, event: events.HostAccess) -> None:
        address, where, write, op, site, note = event
        block = self._blocks.get(address) or self._from_before(address)
        time = self._tick(HOST)
        access = Access(HOST, time, where, write, op, site, note, block.history)
        self._access(block, access, self._clocks[HOST])

    def _from_before(self, address: int) -> TrackedBlock:
        """Add a block from before the check, whose history is unknown."""
        block = self._blocks[address] = TrackedBlock(address, 0)
        return block

    def _access(self, block: TrackedBlock, access: Access, clock: list[int]) -> None:
        if block.history.allocated is None:
            block.history.allocated = access.site
        if block.reusable:
            for other in self._latent.at_first_use(block, access, clock):
                self._race(rules.LATENT, other, access, block)
        if block.inherited:
            block.inherited = self._check_inherited(block, access, clock)
        if access.write:
            self._write(block, access, clock)
            return
        where = access.where
        for other in block.writes:
            if clock[other.actor] < other.time and overlap(other.where, where):
                self._race(rules.READ_AFTER_WRITE, other, access, block)
        actor, reads = access.actor, block.reads
        for at, other in enumerate(reads):
            if other.actor == actor and (other.where is where or other.where == where):
                reads[at] = access  # the newest read of a stream represents all of them
                return
        reads.append(access)
        if len(reads) > block.most_reads:
            block.reads, block.most_reads = self._prune(reads)

    def _write(self, block: TrackedBlock, access: Access, clock: list[int]) -> None:
        """Check a write against all earlier accesses."""
        if block.writes:
            block.writes = self._covered(
                rules.WRITE_AFTER_WRITE, block.writes, access, block, clock
            )
        if block.reads:
            block.reads = self._covered(rules.WRITE_AFTER_READ, block.reads, access, block, clock)
        block.writes.append(access)
        if len(block.writes) > block.most_writes:
            block.writes, block.most_writes = self._prune(block.writes)

    def _covered(
        self,
        rule: Rule,
        others: list[Access],
        access: Access,
        block: TrackedBlock,
        clock: list[int],
    ) -> list[Access]:
        """Check a write against earlier accesses; return those that it does not cover."""
        where = access.where
        low, high, rows, *_ = where
        kept = []
        for other in others:
            place = other.where
            if clock[other.actor] < other.time and overlap(place, where):
                self._race(rule, other, access, block)
            if rows != 1 or low > place.low or high < place.high:
                kept.append(other)
        untrack(kept)
        return kept

    def _prune(self, accesses: list[Access]) -> tuple[list[Access], int]:
        """Leave out what the host, and so every later stream, and every current actor is ordered
        after; of one actor's many, keep the newest per place. Returns with it how many there may be
        before pruning is worth it again.
        """
        clocks = self._clocks
        kept: dict[tuple[int, Footprint], Access] = {}
        for access in accesses:
            if all(clock[access.actor] >= access.time for clock in clocks):
                continue
            kept[(access.actor, access.where)] = access
        left = list(kept.values())
        while len(left) > max(_PLACES, len(clocks)):
            left = coarser(left)
        return left, max(FEW, 2 * len(left))

    def _check_inherited(
        self, block: TrackedBlock, access: Access, clock: list[int]
    ) -> Sequence[Access]:
        """Check an access against those of the bytes' former owners; return those that later
        accesses must be checked against.
        """
        rest = []
        for other in block.inherited:
            if not overlap(other.where, access.where):
                rest.append(other)
            elif clock[other.actor] >= other.time:
                continue
            elif other.write or access.write:
                self._race(rules.USE_AFTER_FREE, other, access, block)
            else:
                rest.append(other)
        if not rest:
            return ()
        untrack(rest)
        return rest

    def _race(self, rule: Rule, first: Access, second: Access, block: TrackedBlock) -> None:
        if rule in (rules.USE_AFTER_FREE, rules.LATENT):
            self._latent.safe.add(first.site)  # not reported again at the end
        rule = rule_of(rule, first, second)
        key: tuple[Any, ...] = (rule.id, rule.kind, first.site, second.site)
        if self.replays:
            key = (*key, first.actor, first.time, second.actor, second.time, block.address)
        if key in self._reported:
            return
        self._reported.add(key)
        pair = {first.actor, second.actor}
        near = [sync for sync in self._syncs if sync.source in pair or sync.waiter in pair]
        context = None
        if self.context is not None:
            context = self.context(first.actor, second.actor, block.address)
        self.races.append(
            Race(
                rule,
                first,
                second,
                block.address,
                log_index=len(self._log) - 1 if self._log is not None else -1,
                syncs=tuple(near[-8:]),
                owner=block.owner,
                later=self._time(first.actor) - first.time,
                context=context,
            )
        )

    # -- synchronisation

    def _event_record(self, event: events.EventRecord) -> None:
        number, actor, site = event
        if self.legacy:
            self._barrier(actor)
        self._merge(actor, self._clocks[HOST])
        clock = list(self._clocks[actor])
        sync = Sync("record", -1, actor, clock[actor], site, number)
        self._events[number] = (clock, sync)
        self._syncs.append(sync)

    def _event_wait(self, event: events.EventWait) -> None:
        number, actor, site = event
        if self.legacy:
            self._barrier(actor)
        found = self._events.get(number)
        if found is None:
            self.unknown_events += 1
            self._syncs.append(Sync("wait-unrecorded", actor, -1, 0, site, number))
            return
        clock, recorded = found
        source, time = recorded.source, recorded.source_time
        if source == actor:
            sync = Sync("self-wait", actor, source, time, site, number, self._time(actor))
            self.self_waits.append(sync)
        else:
            sync = Sync("wait", actor, source, time, site, number, self._time(actor))
            if self._merge(actor, clock) or not time:
                self._useful.add(site)
            else:
                self._idle_waits[site] = self._idle_waits.get(site, 0) + 1
        self._syncs.append(sync)

    def _stream_wait(self, event: events.StreamWait) -> None:
        waiter, source, site = event
        self._merge(source, self._clocks[HOST])
        self._merge(waiter, self._clocks[source])
        times = self._time(source), self._time(waiter)
        self._syncs.append(Sync("wait", waiter, source, times[0], site, 0, times[1]))

    def _order(self, event: events.StreamOrder) -> None:
        self._merge(event.waiter, self._clocks[event.source])

    def _signal(self, event: events.Signal) -> None:
        self._merge(event.actor, self._clocks[HOST])
        self._signals[event.key] = list(self._clocks[event.actor])

    def _signal_wait(self, event: events.SignalWait) -> None:
        clock = self._signals.get(event.key)
        if clock is not None:
            self._merge(event.waiter, clock)

    def _event_synchronize(self, event: events.EventSynchronize) -> None:
        found = self._events.get(event.event)
        if found is None:
            return
        clock, recorded = found
        self._merge(HOST, clock)
        source, time = recorded.source, recorded.source_time
        self._syncs.append(Sync("host-wait", HOST, source, time, event.site, event.event))

    def _event_destroy(self, event: events.EventDestroy) -> None:
        self._events.pop(event.event, None)

    def _stream_synchronize(self, event: events.StreamSynchronize) -> None:
        self._host_wait(event.actor, event.site)

    def _device_synchronize(self, event: events.DeviceSynchronize) -> None:
        for (device, _), actor in self._actors.items():
            if device == event.device:
                self._host_wait(actor, event.site)

    def _host_wait(self, actor: int, site: Site) -> None:
        self._merge(HOST, self._clocks[actor])
        self._syncs.append(Sync("host-wait", HOST, actor, self._time(actor), site))

    @property
    def redundant(self) -> dict[Site, int]:
        """Places where each wait ordered only what was ordered already, with their counts."""
        return {at: count for at, count in self._idle_waits.items() if at not in self._useful}

    @property
    def kept(self) -> int:
        """The number of accesses in memory."""
        live = sum(len(block.uses()) + len(block.inherited) for block in self._blocks.values())
        return live + self._freed.kept

    # -- verifying a fix

    def is_done(self, access: Access) -> bool:
        """Whether the access's actor has done its operation."""
        return self._time(access.actor) >= access.time

    def has_access(self, address: int, access: Access) -> bool:
        """Whether the live block at ``address`` keeps this access as its own."""
        block = self._blocks.get(address)
        return block is not None and any(
            one.actor == access.actor and one.time == access.time for one in block.uses()
        )

    def log_before(self, race: Race) -> Sequence[Event]:
        """The events up to the race's second access; none if the log does not reach that far."""
        if self._log is None or not self._is_logged(race):
            return ()
        return tuple(self._log.first(race.log_index + 1))

    def _is_logged(self, race: Race) -> bool:
        """Whether the log reaches from the start to the race."""
        return self._log is not None and self._log.complete and race.log_index >= 0

    def replayed(self, repaired: RepairedLog, last: int) -> Engine:
        """Another engine after the log, up to event ``last``, with a repair."""
        other = Engine(keep_log=False)
        other.replays = True
        other.legacy.blocking = self.legacy.blocking
        for device, number in self.names[1:]:
            other.stream(device, number)
        log = () if self._log is None else self._log.first(last + 1)
        for event in repaired(other, enumerate(log)):
            other.apply(event)
        return other

    def fixed_races(self, repaired: RepairedLog, races: Sequence[Race]) -> list[Race]:
        """Those of ``races`` that a repaired log does not have."""
        if any(not self._is_logged(race) for race in races):
            return []
        other = self.replayed(repaired, max(race.log_index for race in races))
        if any(race.rule is rules.LATENT for race in races):
            other.at_end()
        left = {found.identity for found in other.races}
        return [one for one in races if one.identity not in left]

    def is_fixed(self, race: Race, repaired: RepairedLog) -> bool | None:
        """Whether a repaired log has neither the race nor one with an access that the repair adds.
        None: the log does not reach that far.
        """
        if not self._is_logged(race):
            return None
        other = self.replayed(repaired, race.log_index)
        if race.rule is rules.LATENT:
            other.at_end()
        return not any(
            ADDED in (found.first.op, found.second.op) or race.identity == found.identity
            for found in other.races
        )


RepairedLog: TypeAlias = Callable[[Engine, Iterable[tuple[int, Event]]], Iterator[Event]]
"""A log as a repair makes it: gets the engine that replays it, which has applied everything yielded
so far, and the original events with their index.
"""


_HANDLERS: Final[dict[type[Event], Callable[[Engine, Any], None]]] = {
    events.Allocation: Engine._allocation,
    events.Free: Engine._free,
    events.RecordStream: Engine._record_stream,
    events.ForgetStream: Engine._forget_stream,
    events.Launch: Engine._launch,
    events.Publication: Engine._publication,
    events.GraphCapture: Engine._graph_capture,
    events.GraphReplay: Engine._graph_replay,
    events.HostAccess: Engine._host_access,
    events.EventRecord: Engine._event_record,
    events.EventWait: Engine._event_wait,
    events.EventSynchronize: Engine._event_synchronize,
    events.EventDestroy: Engine._event_destroy,
    events.StreamWait: Engine._stream_wait,
    events.StreamSynchronize: Engine._stream_synchronize,
    events.DeviceSynchronize: Engine._device_synchronize,
    events.StreamOrder: Engine._order,
    events.Signal: Engine._signal,
    events.SignalWait: Engine._signal_wait,
}
