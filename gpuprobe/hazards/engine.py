"""Happens-before over streams and the host.

Every stream has a clock: how far it, at its newest operation, has seen each other stream. The
host is an actor like a stream: a launch sees what the host has waited for, and the host sees a
stream's work when it synchronizes. Two accesses are ordered if the later one's stream had seen
the earlier one when it was launched. Sources: the CUDA programming guide on streams and events,
torch's notes on CUDA semantics.

Blocks: what was done to a freed block is inherited by whoever gets its bytes next, and checked at
that owner's first access, not at the free. Waits take an event's value at its record.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final

from gpuprobe.hazards import rules
from gpuprobe.hazards.accesses import (
    FEW,
    HOST,
    Access,
    BlockHistory,
    Race,
    RaceContext,
    Sync,
    TrackedBlock,
    coarser,
    rule_of,
)
from gpuprobe.hazards.footprint import Footprint, overlap
from gpuprobe.hazards.freed import FreedBytes
from gpuprobe.hazards.latent import Loose
from gpuprobe.hazards.legacy import LegacyDefault
from gpuprobe.hazards.log import ADDED, Edit, LogEntry, identity
from gpuprobe.model.rules import Rule

_LOG: Final = 50_000
_PLACES: Final = 2048
"""Places of one block that are remembered one by one; beyond, neighbours are one."""
_new: Final = tuple.__new__  # half the time of calling a named tuple's class


class Engine:
    """Checks a run as it goes. Actors are small numbers from `stream`; addresses are bytes in
    one space for device and pinned memory together (front ends keep them apart).

    ``keep_log`` keeps the last 50,000 calls, so that a fix can be proved by doing them again.
    """

    def __init__(self, *, keep_log: bool = True) -> None:
        self._actors: dict[tuple[int, int], int] = {}
        self.names: list[tuple[int, int]] = [(-1, -1)]
        # What people call a stream by, where its number is a handle: the position in torch's pool.
        self.labels: dict[tuple[int, int], int] = {}
        self._clocks: list[list[int]] = [[0]]
        self._blocks: dict[int, TrackedBlock] = {}
        self._freed = FreedBytes()
        self._events: dict[int, tuple[list[int], Sync]] = {}
        self._signals: dict[int, list[int]] = {}  # events that libraries record by themselves
        self._loose = Loose()
        self._lost: dict[tuple[int, int], Any] = {}  # (graph, address) -> where it was freed
        self._syncs: deque[Sync] = deque(maxlen=256)
        self._seen: set[tuple[Any, ...]] = set()
        self.races: list[Race] = []
        self._idle_waits: dict[Any, int] = {}  # by place: waits that brought nothing new
        self._useful: set[Any] = set()  # places of those that did
        self.self_waits: list[Sync] = []
        self.operations = 0
        self.unknown_events = 0
        self._keep_log = keep_log
        self._log: list[LogEntry] = []
        self.log_complete = True
        self._every = False  # report each race, not each pair of sites
        # What the program calls the tensors that a place uses on another stream than their own.
        self.called: dict[Any, tuple[str, ...]] = {}
        self.legacy = LegacyDefault()
        self.context: Callable[[int, int, int], RaceContext] | None = None  # asked at each race

    # -- actors and clocks

    def stream(self, device: int, number: int) -> int:
        """The actor of a stream, made at its first use."""
        key = (device, number)
        found = self._actors.get(key)
        if found is None:
            found = self._actors[key] = len(self.names)
            self.legacy.made(found, device, number)
            self.names.append(key)
            for clock in self._clocks:
                clock.append(0)
            self._clocks.append([0] * (found + 1))
        return found

    def _note(self, *entry: Any) -> None:
        if not self._keep_log:
            return
        if len(self._log) >= _LOG:
            self._log.clear()
            self._keep_log = False
            self.log_complete = False
            return
        self._log.append(entry)

    def _merge(self, into: int, clock: Sequence[int]) -> bool:
        """Take over what ``clock`` has seen. False where there was nothing new in it."""
        mine = self._clocks[into]
        news = False
        for at, time in enumerate(clock):
            if time > mine[at]:
                mine[at] = time
                news = True
        return news

    def _barrier(self, actor: int) -> None:
        for other in self.legacy.before(actor, self.names[actor][0]):
            self._merge(actor, self._clocks[other])

    # -- memory

    def alloc(self, address: int, size: int, owner: int = -1, private: bool = False) -> None:
        """A block begins, and inherits what was done to its bytes before. ``owner``: the stream it
        is allocated on, -1 if unknown. ``private``: in a CUDA graph's pool, for no other tensor.
        """
        self._note("alloc", address, size, owner, private)
        block = self._blocks[address] = TrackedBlock(address, size, owner, private)
        block.inherited = self._freed.take(address, size)
        if self._loose and owner > 0 and not private:
            block.maybe = self._loose.could_be(block, self._clocks[owner])

    def knows(self, address: int) -> bool:
        """Whether a live block begins at ``address``."""
        return address in self._blocks

    def block(self, address: int) -> object:
        """The live block at ``address``, for comparison only; None where there is none."""
        return self._blocks.get(address)

    def end_matters(self, address: int) -> bool:
        """Whether a report may have to name the place where the block at ``address`` is freed: a
        captured graph uses it, or another stream still does.
        """
        block = self._blocks.get(address)
        if block is None:
            return False
        return bool(block.graphs) or (len(self.names) > 2 and self._unsettled(block))

    def foreign(self, address: int, actor: int) -> bool:
        """Whether a block was allocated on another stream than ``actor``."""
        block = self._blocks.get(address)
        return block is not None and block.owner not in (-1, actor)

    def made(self, address: int, site: Any) -> None:
        """Where a block was allocated, if nothing is launched for that."""
        if address in self._blocks:
            self._blocks[address].made = site

    def _unsettled(self, block: TrackedBlock) -> bool:
        """Whether the host has not waited for all that another stream than the block's own does
        with it.
        """
        host = self._clocks[HOST]
        return any(
            host[access[0]] < access[1] and access[0] != block.owner
            for access in block.writes + block.reads
        )

    def free(self, address: int, site: Any = None, waits: bool = False) -> None:
        """A block ends. Streams named by `record_stream` hold it until they are done. ``site``:
        where, if `end_matters`. ``waits``: it is not handed on before all that used it is done
        (pinned memory: ``CachingHostAllocator`` records an event on each stream that copies).
        """
        self._note("free", address, site, waits)
        block = self._blocks.pop(address, None)
        if block is None:
            return
        for graph in block.graphs:
            self._lost[(graph, address)] = site
        if waits:
            return
        host = self._clocks[HOST]
        history = _new(BlockHistory, (block.made, site, ()))
        # A block that was never touched hands on what it had inherited itself.
        kept = [
            access if access[7] else _new(Access, (*access[:7], history))
            for access in block.writes + block.reads + block.inherited
            if host[access[0]] < access[1]
        ]
        for actor in block.uses:
            clock = self._clocks[actor]
            kept = [access for access in kept if clock[access[0]] < access[1]]
        if kept:
            self._freed.add(address, block.size, kept)
            # Memory is loose for other streams only.
            if block.owner > 0 and len(self.names) > 2 and not block.private:
                self._loose.add(block, kept, self._clocks[block.owner])

    def at_end(self) -> None:
        """The watch ends: what is still latent is found (see `Loose`)."""
        host = self._clocks[HOST]
        for block, access in self._loose.left(host, self._clocks):
            freed = None if access.history is None else access.history.freed
            time = self._clocks[block.owner][block.owner]
            owner = Access(block.owner, time, access.where, True, "free", freed)
            self._race(rules.LATENT, access, owner, block)

    def record_stream(self, address: int, actor: int) -> None:
        """The allocator will not hand the block on before this stream's work is done. It ignores
        the stream that the block was allocated on (``CUDACachingAllocator.cpp``,
        ``recordStream``).
        """
        self._note("record_stream", address, actor)
        block = self._blocks.get(address)
        if block is not None and actor != block.owner:
            block.uses.add(actor)

    def forget_stream(self, address: int, actor: int) -> None:
        """What kept the block for this stream keeps it no longer."""
        self._note("forget_stream", address, actor)
        block = self._blocks.get(address)
        if block is not None:
            block.uses.discard(actor)

    def has_stream(self, device: int, number: int) -> bool:
        """Whether the stream has done something."""
        return (device, number) in self._actors

    @property
    def many_streams(self) -> bool:
        """Whether more than one stream has done something."""
        return len(self.names) > 2

    # -- work

    def launch(
        self,
        actor: int,
        op: Any,
        accesses: Sequence[tuple[int, Footprint, bool]],
        site: Any,
        note: str = "",
    ) -> None:
        """An operation on a stream. ``accesses``: block address, bytes, whether it writes."""
        if self._keep_log:
            self._note("launch", actor, op, accesses, site, note)
        self._launch(actor, op, accesses, site, note)

    def _launch(
        self,
        actor: int,
        op: Any,
        accesses: Sequence[tuple[int, Footprint, bool]],
        site: Any,
        note: str,
    ) -> None:
        self.operations += 1
        if self.legacy:
            self._barrier(actor)
        clock = self._clocks[actor]
        for at, seen in enumerate(self._clocks[HOST]):
            if seen > clock[at]:
                clock[at] = seen
        time = clock[actor] = clock[actor] + 1
        for address, where, write in accesses:
            access = _new(Access, (actor, time, where, write, op, site, note, None))
            self._access(address, access, clock)

    def published(
        self, actor: int, op: Any, accesses: Sequence[tuple[int, Footprint, bool]], site: Any
    ) -> None:
        """These bytes count as written on this stream now, whatever was done to them before."""
        self._note("published", actor, op, accesses, site)
        clock = self._clocks[actor]
        time = clock[actor] = clock[actor] + 1
        for address, where, _ in accesses:
            block = self._blocks.get(address)
            if block is not None:
                block.writes.append(Access(actor, time, where, True, op, site, "gradient"))

    def captured(self, graph: int, addresses: Sequence[int]) -> None:
        """A graph was captured that uses these blocks, which are not of its own pool. It
        replays over their addresses, whoever they belong to by then.
        """
        self._note("captured", graph, addresses)
        for address in addresses:
            block = self._blocks.get(address)
            if block is None:  # freed within the capture
                self._lost[(graph, address)] = None
            else:
                block.graphs = (*block.graphs, graph)

    def replay(
        self, graph: int, actor: int, accesses: Sequence[tuple[int, Footprint, bool]], site: Any
    ) -> None:
        """All that a graph does, as one operation. Blocks that were freed since the capture are
        reported, and not checked further.
        """
        self._note("replay", graph, actor, accesses, site)
        lost = self._lost
        live = [access for access in accesses if (graph, access[0]) not in lost]
        self._launch(actor, "replay", live, site, "graph")
        time = self._clocks[actor][actor]
        for address, where, write in accesses:
            if (graph, address) in lost:
                freed = Access(HOST, 0, where, True, "free", lost[(graph, address)], "graph")
                replayed = Access(actor, time, where, write, "replay", site, "graph")
                self._race(rules.GRAPH_FREED, freed, replayed, TrackedBlock(address, 0))

    def host_access(
        self, address: int, where: Footprint, write: bool, op: Any, site: Any, note: str = ""
    ) -> None:
        """The host itself reads or writes pinned memory."""
        self._note("host_access", address, where, write, op, site, note)
        clock = self._clocks[HOST]
        time = clock[HOST] = clock[HOST] + 1
        self._access(address, Access(HOST, time, where, write, op, site, note), clock)

    def _access(self, address: int, access: Access, clock: list[int]) -> None:
        block = self._blocks.get(address)
        if block is None:  # memory from before the watch: nothing is known of it
            block = self._blocks[address] = TrackedBlock(address, 0)
        if block.made is None:
            block.made = access[5]
        if block.maybe:
            for other in self._loose.used(block, access, clock):
                self._race(rules.LATENT, other, access, block)
        if block.inherited:
            block.inherited = self._check_inherited(block, access, clock)
        where = access[2]
        if not access[3]:
            actor = access[0]
            for other in block.writes:
                if clock[other[0]] < other[1] and overlap(other[2], where):
                    self._race(rules.READ_AFTER_WRITE, other, access, block)
            reads = block.reads
            for at, other in enumerate(reads):
                if other[0] == actor and (other[2] is where or other[2] == where):
                    reads[at] = access  # the newest of a stream says it all
                    return
            reads.append(access)
            if len(reads) > block.most_reads:
                block.reads, block.most_reads = self._prune(reads)
            return
        if block.writes:
            block.writes = self._passed(rules.WRITE_AFTER_WRITE, block.writes, access, block, clock)
        if block.reads:
            block.reads = self._passed(rules.WRITE_AFTER_READ, block.reads, access, block, clock)
        block.writes.append(access)
        if len(block.writes) > block.most_writes:
            block.writes, block.most_writes = self._prune(block.writes)

    def _passed(
        self,
        rule: Rule,
        others: list[Access],
        access: Access,
        block: TrackedBlock,
        clock: list[int],
    ) -> list[Access]:
        """Check a write against earlier accesses, and leave out those that it covers."""
        where = access.where
        low, high, rows = where[:3]
        kept = []
        for other in others:
            place = other[2]
            if clock[other[0]] < other[1] and overlap(place, where):
                self._race(rule, other, access, block)
            if rows != 1 or low > place[0] or high < place[1]:
                kept.append(other)
        return kept

    def _prune(self, accesses: list[Access]) -> tuple[list[Access], int]:
        """Leave out what the host, and so every stream to come, has seen, and every actor there
        is; of one actor's many, keep the newest per place. Returns with it how many there may be
        before it is worth doing again.
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
    ) -> list[Access]:
        """What the bytes' former owner left behind; what was checked is not checked again."""
        rest = []
        where = access[2]
        for other in block.inherited:
            if not overlap(other[2], where):
                rest.append(other)
            elif clock[other[0]] >= other[1]:
                continue
            elif other[3] or access[3]:
                self._race(rules.USE_AFTER_FREE, other, access, block)
            else:
                rest.append(other)
        return rest

    def _race(self, rule: Rule, first: Access, second: Access, block: TrackedBlock) -> None:
        if rule in (rules.USE_AFTER_FREE, rules.LATENT):
            self._loose.safe.add(first.site)  # found: not once more at the end of the watch
        rule = rule_of(rule, first, second)
        key: tuple[Any, ...] = (rule.id, rule.kind, first.site, second.site)
        if self._every:
            key = (*key, first.actor, first.time, second.actor, second.time, block.address)
        if key in self._seen:
            return
        self._seen.add(key)
        pair = {first.actor, second.actor}
        near = [sync for sync in self._syncs if sync.source in pair or sync.waiter in pair]
        index = len(self._log) - 1 if self._keep_log else -1
        later = self._clocks[first.actor][first.actor] - first.time
        context = None
        if self.context is not None:
            context = self.context(first.actor, second.actor, block.address)
        self.races.append(
            Race(
                rule,
                first,
                second,
                block.address,
                index,
                tuple(near[-8:]),
                block.owner,
                later,
                context,
                first.history,
            )
        )

    # -- synchronisation

    def event_record(self, event: int, actor: int, site: Any = None) -> None:
        """An event takes the value of the stream's clock now."""
        self._note("event_record", event, actor, site)
        if self.legacy:
            self._barrier(actor)
        self._merge(actor, self._clocks[HOST])
        clock = list(self._clocks[actor])
        sync = Sync("record", -1, actor, clock[actor], site, event, self.operations)
        self._events[event] = (clock, sync)
        self._syncs.append(sync)

    def event_wait(self, event: int, actor: int, site: Any = None) -> None:
        """A stream waits for an event's value. One that was never recorded is no wait."""
        self._note("event_wait", event, actor, site)
        if self.legacy:
            self._barrier(actor)
        found = self._events.get(event)
        if found is None:
            self.unknown_events += 1
            self._syncs.append(Sync("wait-unrecorded", actor, -1, 0, site, event, self.operations))
            return
        clock, recorded = found
        own = recorded.source == actor
        kind = "self-wait" if own else "wait"
        mine = self._clocks[actor][actor]
        sync = Sync(kind, actor, recorded.source, recorded.time, site, event, self.operations, mine)
        self._syncs.append(sync)
        if own:
            self.self_waits.append(sync)
        elif self._merge(actor, clock) or not recorded.time:
            self._useful.add(site)
        else:
            self._idle_waits[site] = self._idle_waits.get(site, 0) + 1

    def stream_wait(self, waiter: int, source: int, site: Any = None) -> None:
        """``waiter`` waits for all that ``source`` has queued."""
        self._note("stream_wait", waiter, source, site)
        self._merge(source, self._clocks[HOST])
        self._merge(waiter, self._clocks[source])
        time = self._clocks[source][source]
        mine = self._clocks[waiter][waiter]
        self._syncs.append(Sync("wait", waiter, source, time, site, 0, self.operations, mine))

    def order(self, waiter: int, source: int) -> None:
        """An edge that a library makes by itself, and no line of the program asked for."""
        self._note("order", waiter, source)
        self._merge(waiter, self._clocks[source])

    def signal(self, key: int, actor: int) -> None:
        """A library records an event of its own, for `await_signal`."""
        self._note("signal", key, actor)
        self._merge(actor, self._clocks[HOST])
        self._signals[key] = list(self._clocks[actor])

    def await_signal(self, waiter: int, key: int) -> None:
        """A stream waits for a library's event; one that was not recorded is no wait."""
        self._note("await_signal", waiter, key)
        clock = self._signals.get(key)
        if clock is not None:
            self._merge(waiter, clock)

    def event_synchronize(self, event: int, site: Any = None) -> None:
        """The host waits for an event."""
        self._note("event_synchronize", event, site)
        found = self._events.get(event)
        if found is None:
            return
        clock, recorded = found
        self._merge(HOST, clock)
        sync = Sync("host-wait", HOST, recorded.source, recorded.time, site, event, self.operations)
        self._syncs.append(sync)

    def event_destroyed(self, event: int) -> None:
        """Nobody can wait for it any more."""
        self._note("event_destroyed", event)
        self._events.pop(event, None)

    def stream_synchronize(self, actor: int, site: Any = None) -> None:
        """The host waits for a stream."""
        self._note("stream_synchronize", actor, site)
        self._merge(HOST, self._clocks[actor])
        time = self._clocks[actor][actor]
        self._syncs.append(Sync("host-wait", HOST, actor, time, site, 0, self.operations))

    def device_synchronize(self, device: int, site: Any = None) -> None:
        """The host waits for all streams of a device."""
        self._note("device_synchronize", device, site)
        for (index, _), actor in self._actors.items():
            if index == device:
                self._merge(HOST, self._clocks[actor])
                time = self._clocks[actor][actor]
                self._syncs.append(Sync("host-wait", HOST, actor, time, site, 0, self.operations))

    # -- proving a fix

    def passed(self, actor: int, time: int) -> bool:
        """Whether an actor has done its operation number ``time``."""
        return self._clocks[actor][actor] >= time

    def used(self, address: int, access: Access) -> bool:
        """Whether the live block at ``address`` has this access among its own."""
        block = self._blocks.get(address)
        return block is not None and any(
            one.actor == access.actor and one.time == access.time
            for one in block.writes + block.reads
        )

    def log_before(self, race: Race) -> Sequence[LogEntry]:
        """The calls up to the race's second access; none where the log does not reach so far."""
        if race.log_index < 0 or not self.log_complete:
            return ()
        return self._log[: race.log_index + 1]

    def done_again(self, edit: Edit, last: int) -> Engine:
        """Another engine that was given the log up to entry ``last``, with an edit."""
        other = Engine(keep_log=False)
        other._every = True
        other.legacy.blocking = self.legacy.blocking
        for device, number in self.names[1:]:
            other.stream(device, number)
        for at, entry in enumerate(self._log[: last + 1]):
            if edit(other, at, entry):
                getattr(other, entry[0])(*entry[1:])
        return other

    def cured(self, edit: Edit, races: Sequence[Race]) -> list[Race]:
        """Which of ``races`` are gone when the log is done again with an edit."""
        if not self.log_complete or any(race.log_index < 0 for race in races):
            return []
        other = self.done_again(edit, max(race.log_index for race in races))
        if any(race.rule is rules.LATENT for race in races):
            other.at_end()
        left = {identity(found) for found in other.races}
        return [one for one in races if identity(one) not in left]

    def without(self, race: Race, edit: Edit) -> bool | None:
        """Whether the race is gone when the log is done again with an edit, and none that the
        edit adds took its place. None: the log does not reach that far.
        """
        if not self.log_before(race):
            return None
        other = self.done_again(edit, race.log_index)
        if race.rule is rules.LATENT:
            other.at_end()
        wanted = identity(race)
        return not any(
            ADDED in (found.first.op, found.second.op) or wanted == identity(found)
            for found in other.races
        )

    @property
    def redundant(self) -> dict[Any, int]:
        """Places whose waits, all of them, ordered nothing that was not in order, with how many."""
        return {at: count for at, count in self._idle_waits.items() if at not in self._useful}

    @property
    def kept(self) -> int:
        """Accesses that are remembered."""
        live = sum(
            len(block.writes) + len(block.reads) + len(block.inherited)
            for block in self._blocks.values()
        )
        return live + self._freed.kept
