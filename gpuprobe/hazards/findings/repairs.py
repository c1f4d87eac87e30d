"""Repairs of races, one class per kind: the words, the change of the source, the repaired log.

A wait is put before the statement that races, or further out, where the program has names for
both streams; the stream that is current there is never named. Without names, an event is recorded
after the first statement, and the second waits for it.
"""

from __future__ import annotations

import ast
import inspect
import linecache
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Final, TypeAlias

from gpuprobe.hazards import rules
from gpuprobe.hazards.accesses import Race, RaceContext, Scope
from gpuprobe.hazards.engine import Engine
from gpuprobe.hazards.events import (
    ADDED,
    FUNCTIONAL,
    HOST,
    Allocation,
    BlockAccess,
    CodePosition,
    DeviceSynchronize,
    Event,
    EventRecord,
    EventSynchronize,
    EventWait,
    Free,
    HostAccess,
    Launch,
    RecordStream,
    Site,
    StreamOrder,
    StreamSynchronize,
    StreamWait,
)
from gpuprobe.hazards.findings.code import (
    StatementAt,
    free_name,
    handle_of_call,
    is_name,
    is_plain,
    statement,
    torch_name,
    unified_diff,
)
from gpuprobe.model.findings import Fix, Insertion
from gpuprobe.model.place import Place
from gpuprobe.model.rules import Rule

PlaceOf: TypeAlias = Callable[[Any], Place | None]
"""Resolves a front end's opaque site to a file and a line, or None."""
Log: TypeAlias = Iterable[tuple[int, Event]]
"""Events with their index in the engine's log; -1 for one that a repair inserted."""

_EVENT: Final = 1 << 62  # of a repair: a number that no event of the program has
_EVENT_NAME: Final = "done"
_CURRENT: Final = "torch.cuda.current_stream()"
_PARTS_OF_A_STATEMENT: Final = ("<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>")
"""Frames that run within a statement of the next one, which has the names that are valid there."""


@dataclass(frozen=True)
class LocatedRace:
    """A race with the engine that found it, and the statements of its two accesses, if their source
    is available.
    """

    engine: Engine
    race: Race
    place: PlaceOf
    first: StatementAt | None
    second: StatementAt | None

    @classmethod
    def locate(cls, engine: Engine, race: Race, place: PlaceOf) -> LocatedRace:
        """Find the statements of a race's accesses."""
        one, other = (_statement(place(access.site)) for access in (race.first, race.second))
        return cls(engine, race, place, one, other)

    @property
    def recorded_names(self) -> tuple[str, ...]:
        """Names for the tensor at the first access, recorded when it ran."""
        return self.engine.tensor_names.get(self.race.first.site, ())

    @property
    def tensor_names(self) -> tuple[str, ...]:
        """Names for the tensor at the first access, or else at the second."""
        context = self.race.context
        if context is not None and context.scopes:
            return self.recorded_names or context.scopes[0].tensors
        return self.recorded_names

    @property
    def first_is_collective(self) -> bool:
        return self.race.first.actor != HOST and self.is_collective(self.race.first.actor)

    @property
    def is_use_after_free(self) -> bool:
        return self.race.rule.id in (rules.USE_AFTER_FREE.id, rules.LATENT.id)

    @property
    def is_unrecorded(self) -> bool:
        """Whether memory was freed while another stream than its owner uses it."""
        return self.is_use_after_free and self.race.first.actor != self.race.owner

    @property
    def in_one_statement(self) -> bool:
        """Whether both accesses belong to one statement, executed once."""
        if self.first is None or self.second is None or self.first.node is not self.second.node:
            return False
        one, other = self.race.first.site, self.race.second.site
        return (
            isinstance(one, CodePosition)
            and isinstance(other, CodePosition)
            and one.code is other.code
            and one.instruction < other.instruction
        )

    @property
    def first_always_runs_before(self) -> bool:
        """Whether the first statement has always run when the second does: both are in one
        function, and the first is in no branch that the second is not in.
        """
        first, second = self.first, self.second
        one, other = self.race.first.site, self.race.second.site
        if first is None or second is None or first.file != second.file:
            return False
        if not isinstance(one, CodePosition) or not isinstance(other, CodePosition):
            return False
        if one.code is not other.code or first.end >= second.line:
            return False
        branches = second.branches
        return all(any(node is branch for branch in branches) for node in first.branches)

    @cached_property
    def second_is_inside(self) -> bool:
        """Whether the second access is made while its statement runs other code as well: in a
        comprehension, a lambda, or the header of a loop.
        """
        second, site = self.second, self.race.second.site
        if second is None or not isinstance(site, CodePosition):
            return False
        if isinstance(second.node, (ast.For, ast.AsyncFor, ast.While)):
            return True
        if site.code.co_name in (*_PARTS_OF_A_STATEMENT, "<lambda>"):
            return True
        position = position_of(site)  # comprehensions have no separate code since Python 3.12
        return any(
            position is None or _contains(node, position)
            for node in ast.walk(second.node)
            if isinstance(node, (ast.ListComp, ast.SetComp, ast.DictComp))
        )

    @property
    def first_may_be_inside(self) -> bool:
        """Whether the statement of such a second access may have made the first one as well: it
        has it itself, or runs code that may.
        """
        first, second = self.race.first.site, self.second
        if second is None or not isinstance(first, CodePosition):
            return False
        place = self._in_function(first)
        if place is not None:
            return second.line <= place.line <= second.end
        loop = isinstance(second.node, (ast.For, ast.AsyncFor, ast.While))
        calls = any(isinstance(node, ast.Call) for node in ast.walk(second.node))
        return loop or calls or bool(first.code.co_flags & inspect.CO_GENERATOR)

    def start_of_statement(self, index: int) -> int:
        """The index of the event right after the last one before ``index`` that the function of the
        second access's statement has surely made outside that statement: other events may be
        from code that the statement calls.
        """
        second, start = self.second, 0
        for at, event in enumerate(self.engine.log_before(self.race)):
            here = None if at >= index else self._in_function(getattr(event, "site", None))
            inside = second is None or here is None or second.line <= here.line <= second.end
            start = start if inside else at + 1
        return start

    def _in_function(self, site: Site) -> Place | None:
        """The place of a site, if it is in the function of the second access's statement."""
        context = self.race.context
        if context is None or not isinstance(site, CodePosition):
            return None
        scopes = (scope.code for scope in context.scopes)
        code = next((one for one in scopes if one.co_name not in _PARTS_OF_A_STATEMENT), None)
        part = site.code.co_name in _PARTS_OF_A_STATEMENT[:3]  # a generator may run anywhere
        own = site.code is code or (part and code is not None and site.code in code.co_consts)
        return self.place(site) if own else None

    @property
    def waiter(self) -> int:
        """The stream that must wait before the second access: for a collective, the one that it is
        called on.
        """
        actor, context = self.race.second.actor, self.race.context
        if not self.is_collective(actor) or context is None or not context.current:
            return actor
        return context.current[0]

    def is_collective(self, actor: int) -> bool:
        """Whether an actor is a stream of a process group."""
        _, number = self.engine.names[actor]
        return number < 0

    def device(self, actor: int) -> int:
        """The device of an actor's stream."""
        device, _ = self.engine.names[actor]
        return device

    def expression(self, actor: int, default: str) -> str:
        """A stream as code, with the name of the innermost frame that has one."""
        context = self.race.context
        if context is not None:
            for scope in context.scopes:
                if scope.streams.get(actor):
                    return scope.streams[actor][0]
            if actor in context.current:
                return _CURRENT
        _, number = self.engine.names[actor]
        return _CURRENT if number == 0 else default


def position_of(site: Site) -> tuple[int, int, int, int] | None:
    """First and last line, first and last column of a site's instruction; None if Python does not
    keep them.
    """
    if not isinstance(site, CodePosition) or sys.version_info < (3, 11):
        return None
    for at, position in enumerate(site.code.co_positions()):
        if 2 * at == site.instruction:
            line, end, column, end_column = position
            if line is None or end is None or column is None or end_column is None:
                return None
            return line, end, column, end_column
    return None


def _contains(node: ast.expr, position: tuple[int, int, int, int]) -> bool:
    line, end, column, end_column = position
    begins = (node.lineno, node.col_offset) <= (line, column)
    return begins and (end, end_column) <= (node.end_lineno or end, node.end_col_offset or 0)


def _statement(place: Place | None) -> StatementAt | None:
    return None if place is None else statement(place.file, place.line)


class Repair:
    """One fix of one race. A kind of repair is a subclass: ``words`` describe it (empty: the rule's
    remedy does), `in_source` and `in_words` write it as code, and `after_first`, `before_second` or
    `log` are the same as a change of the log, which verifies it.

    ``code``: lines to be pasted, each with its position; ``insertions``: the same for the source.
    """

    words: ClassVar[str] = ""
    shared: ClassVar[bool] = False
    """Whether it may fix other races than its own: it waits."""

    def __init__(
        self, located: LocatedRace, code: str = "", insertions: tuple[Insertion, ...] = ()
    ) -> None:
        self.located = located
        self.race = located.race
        self.insertions = insertions
        self.code = code or listing(insertions)

    @classmethod
    def in_source(cls, located: LocatedRace) -> Iterator[Repair]:
        """The repairs of this kind that the program's source allows, the best first."""
        return iter(())

    @classmethod
    def in_words(cls, located: LocatedRace) -> Repair:
        """The repair as code for a program whose source is unknown."""
        raise NotImplementedError

    def fix(self) -> Fix:
        """The repair for a reader: a sentence, the code, a diff."""
        return Fix(f"{self.text()}.", self.code, unified_diff(self.insertions))

    def text(self) -> str:
        """The sentence, without its period."""
        return self.words or self.race.rule.remedy

    def after_first(self) -> tuple[Event, ...]:
        """The events that it adds right after the first access."""
        return ()

    def waits(self, actor: int) -> tuple[Event, ...]:
        """The events that make an actor wait."""
        return ()

    def before_second(self) -> tuple[Event, ...]:
        """The events that it adds before the second access."""
        return self.waits(self.race.second.actor)

    def log(self, replay: Engine, log: Log) -> Iterator[Event]:
        """The repaired log. ``replay`` has applied all events that were yielded."""
        after = self.after_first()
        waits_at = self._waits_at(self.race.log_index)
        for at, event in log:
            if after and replay.is_done(self.race.first):
                yield from after
                after = ()
            if at == waits_at:
                yield from self.before_second()
            yield event

    def _waits_at(self, second: int) -> int:
        """The index of the event before which the code runs that precedes the second access, of
        index ``second``: an earlier one, if that code precedes a statement which makes the access
        at any time, or several times, while it runs.
        """
        located = self.located
        if not self.insertions or not located.second_is_inside or not located.first_may_be_inside:
            return second
        return self.located.start_of_statement(second)

    def log_everywhere(self, replay: Engine, log: Log) -> Iterator[Event]:
        """The log with the repair each time that its lines run."""
        return self.log(replay, self._at_each_run(log))

    def _at_each_run(self, log: Log) -> Log:
        race, follows_first = self.race, False
        for at, event in log:
            if follows_first:
                yield from ((-1, added) for added in self.after_first())
            follows_first = False
            if isinstance(event, (Launch, HostAccess)):
                follows_first = event.site == race.first.site
                again = event.site == race.second.site and at != race.log_index
                if again and not self.located.second_is_inside:
                    actor = event.actor if isinstance(event, Launch) else HOST
                    yield from ((-1, added) for added in self.waits(actor))
            yield at, event


# -- waits


class Wait(Repair):
    """The second access's stream waits for the first's; before a collective, the stream that calls
    it does.
    """

    words = "make the second stream wait for the first"
    shared = True

    @classmethod
    def in_source(cls, located: LocatedRace) -> Iterator[Repair]:
        insertion = _wait_by_name(located.race, located.waiter, located.race.first.actor)
        if insertion is not None:
            yield cls(located, insertions=(insertion,))

    @classmethod
    def in_words(cls, located: LocatedRace) -> Repair:
        source = located.expression(located.race.first.actor, "side")
        other = "other" if source == "side" else "side"
        waiter = located.expression(located.race.second.actor, other)
        return cls(located, f"{waiter}.wait_stream({source})")

    def text(self) -> str:
        if not self.race.later or self.race.rule is rules.USE_AFTER_FREE:
            return self.words
        return (
            f"{self.words}. It also waits for later work on that stream: if that costs overlap, "
            "record an event right after the first access, and wait for that"
        )

    def waits(self, actor: int) -> tuple[Event, ...]:
        return (StreamWait(actor, self.race.first.actor),)

    def log(self, replay: Engine, log: Log) -> Iterator[Event]:
        located, race = self.located, self.race
        if not located.is_collective(race.second.actor):
            yield from super().log(replay, log)
            return
        calls = [
            (at, event.source)
            for at, event in enumerate(located.engine.log_before(race))
            if isinstance(event, StreamWait) and event.waiter == race.second.actor
        ]
        call, caller = calls[-1] if calls else (-2, HOST)
        for at, event in log:
            if at == call:
                yield from self.waits(caller)
            yield event


class WaitForEvent(Repair):
    """An event is recorded right after the first access; the second's stream waits for it."""

    words = "record an event after the first access, and make the second stream wait for it"
    shared = True

    @classmethod
    def in_source(cls, located: LocatedRace) -> Iterator[Repair]:
        insertions = _ordered_by_event(located, host=False)
        if insertions:
            yield cls(located, insertions=insertions)

    def after_first(self) -> tuple[Event, ...]:
        return (EventRecord(_EVENT, self.race.first.actor),)

    def waits(self, actor: int) -> tuple[Event, ...]:
        return (EventWait(_EVENT, actor),)

    def before_second(self) -> tuple[Event, ...]:
        return (*self.waits(self.race.second.actor), *self.waits(self.located.waiter))


class HostWaitsForEvent(Repair):
    """An event is recorded right after the first access; the host waits for it."""

    words = "record an event after the copy, and wait for it before the host uses the memory"
    shared = True

    @classmethod
    def in_source(cls, located: LocatedRace) -> Iterator[Repair]:
        insertions = _ordered_by_event(located, host=True)
        if insertions:
            yield cls(located, insertions=insertions)

    @classmethod
    def in_words(cls, located: LocatedRace) -> Repair:
        stream = located.expression(located.race.first.actor, "side")
        code = f"{_EVENT_NAME} = {stream}.record_event()  # after the copy\n"
        return cls(located, f"{code}{_EVENT_NAME}.synchronize()")

    def after_first(self) -> tuple[Event, ...]:
        return (EventRecord(_EVENT, self.race.first.actor),)

    def waits(self, actor: int) -> tuple[Event, ...]:
        return (EventSynchronize(_EVENT),)


class HostWaits(Repair):
    """The host waits for the first access's stream before the second."""

    words = "wait for the stream of the copy before the host uses the memory"
    shared = True

    @classmethod
    def in_source(cls, located: LocatedRace) -> Iterator[Repair]:
        context, second = located.race.context, located.second
        if context is None or second is None or not context.scopes:
            return
        actor = located.race.first.actor
        stream = _name(context.scopes[0], actor)
        if actor in context.current and not second.inner_blocks:
            stream = f"{torch_name(second.file)}.current_stream()"
        if stream:
            yield cls(located, insertions=(second.before(f"{stream}.synchronize()"),))

    def waits(self, actor: int) -> tuple[Event, ...]:
        return (StreamSynchronize(self.race.first.actor),)


class DeviceWait(Repair):
    """The host waits for all that was launched before the second access."""

    words = (
        "wait for the device; if the code can pass an event recorded after the first access, "
        "waiting for that keeps the overlap"
    )
    shared = True

    @classmethod
    def in_source(cls, located: LocatedRace) -> Iterator[Repair]:
        second = located.second
        if second is None:
            return
        cuda = torch_name(second.file)
        code = [f"{cuda}.synchronize()"]
        if located.device(located.race.first.actor) not in (0, -1):
            devices = f"range({cuda}.device_count())"
            code = [f"for device in {devices}:", f"    {cuda}.synchronize(device)"]
        yield cls(located, insertions=(second.before(*code),))

    @classmethod
    def in_words(cls, located: LocatedRace) -> Repair:
        return cls(located, "torch.cuda.synchronize()")

    def waits(self, actor: int) -> tuple[Event, ...]:
        return (DeviceSynchronize(self.located.device(self.race.first.actor)),)


class AwaitHandle(Repair):
    """``wait()`` on what a collective returned, before the second statement if the handle has a
    name there, else right after the collective.
    """

    words = "wait for the collective's result"

    @classmethod
    def in_source(cls, located: LocatedRace) -> Iterator[Repair]:
        first, second = located.first, located.second
        if first is None or first.inner_blocks:
            return
        handle = handle_of_call(first)
        if handle is None:
            return
        insertions: list[Insertion] = []
        if not handle:
            handle = free_name(first, "work")
            insertions.append(_prefixed(first, f"{handle} = "))
        code = f"{handle}.wait()"
        if located.race.first.note == FUNCTIONAL:
            code = f"torch.ops._c10d_functional.wait_tensor({handle})"
        if second is not None and located.first_always_runs_before and not second.inner_blocks:
            insertions.append(second.before(code))
        else:
            insertions.append(first.after(code))
        yield cls(located, insertions=tuple(insertions))

    @classmethod
    def in_words(cls, located: LocatedRace) -> Repair:
        return cls(located, "work.wait()  # work: the collective's result")

    def after_first(self) -> tuple[Event, ...]:
        return (EventRecord(_EVENT, self.race.first.actor),)

    def before_second(self) -> tuple[Event, ...]:
        if self.race.second.actor == HOST:
            return (EventSynchronize(_EVENT),)
        return tuple(
            EventWait(_EVENT, actor) for actor in (self.race.second.actor, self.located.waiter)
        )


# -- memory that stays valid


class RecordTensor(Repair):
    """``record_stream`` before the tensor of the first access is freed: for its stream; if that is
    a collective's, for the stream that it was called on.
    """

    words = "call record_stream on the tensor for the other stream"

    @classmethod
    def in_source(cls, located: LocatedRace) -> Iterator[Repair]:
        first = located.first
        if first is None:
            return
        # A variable of a comprehension has no value before its statement.
        inside = first.names_of_comprehensions
        names = [name for name in located.tensor_names if is_name(name) and name not in inside]
        stream = f"{torch_name(first.file)}.current_stream()"
        if first.inner_blocks:
            stream = first.inner_blocks[-1].stream
        if names and (not first.inner_blocks or is_plain(stream)):
            lines = (f"{name}.record_stream({stream})" for name in dict.fromkeys(names))
            yield cls(located, insertions=(first.before(*lines),))

    @classmethod
    def in_words(cls, located: LocatedRace) -> Repair:
        stream = located.expression(located.race.first.actor, "side")
        return cls(located, f"tensor.record_stream({stream})  # before it is dropped")

    def log(self, replay: Engine, log: Log) -> Iterator[Event]:
        first = self.race.first
        actor = self._recorded_actor()
        for _, event in log:
            if isinstance(event, Free) and replay.has_access(event.address, first):
                yield RecordStream(event.address, actor)
            yield event

    def _recorded_actor(self) -> int:
        actor = self.race.first.actor
        if self.located.is_collective(actor):
            for event in reversed(self.located.engine.log_before(self.race)):
                if isinstance(event, StreamWait) and event.waiter == actor:
                    return event.source
        return actor


class KeepAlive(Repair):
    """Another reference to a tensor that a graph was captured with: it is not freed."""

    only_for: ClassVar[Rule] = rules.GRAPH_FREED
    """The rule whose races only this repair fixes."""

    @classmethod
    def in_source(cls, located: LocatedRace) -> Iterator[Repair]:
        found = _statement(located.place(located.race.first.site))
        usable = [name for name in located.recorded_names if is_name(name)]
        if found is not None and usable:
            name = usable[0]
            kept = free_name(found, f"static_{name.rpartition('.')[2]}")
            yield cls(located, insertions=(found.before(f"{kept} = {name}"),))

    @classmethod
    def in_words(cls, located: LocatedRace) -> Repair:
        code = "static_input = tensor  # kept as long as the graph; refill it with copy_()"
        return cls(located, code)

    def log(self, replay: Engine, log: Log) -> Iterator[Event]:
        block = self.race.block
        for _, event in log:
            again = isinstance(event, (Allocation, Free)) and event.address == block
            if not (again and replay.is_live(block)):
                yield event


class Clone(Repair):
    """A clone is sent to another process, made on the stream that is current at the statement that
    sends it.
    """

    only_for: ClassVar[Rule] = rules.SHARED
    """The rule whose races only this repair fixes."""

    @classmethod
    def in_source(cls, located: LocatedRace) -> Iterator[Repair]:
        first, names = located.first, located.recorded_names
        if first is None or first.end != first.line or len(names) != 1:
            return
        pattern = re.compile(rf"(?<=[(,\s]){re.escape(names[0])}(?=[,)\s])")
        changed, count = pattern.subn(f"{names[0]}.clone()", _text(first))
        if count == 1:
            insertion = Insertion(first.file, first.line, changed, 1)
            yield cls(located, changed.strip(), (insertion,))

    @classmethod
    def in_words(cls, located: LocatedRace) -> Repair:
        code = "queue.put(tensor.clone())  # or wait for an answer before the tensor is written"
        return cls(located, code)

    def log(self, replay: Engine, log: Log) -> Iterator[Event]:
        receiver, block = self.race.first.actor, self.race.block
        device = self.located.device(self.race.second.actor)
        current = HOST
        for _, event in log:
            if isinstance(event, StreamOrder) and event.waiter == receiver:
                own = self.located.device(event.source) == device
                current = event.source if own else current
            if isinstance(event, Launch) and event.actor == receiver:
                cloned: list[BlockAccess] = []
                others: list[BlockAccess] = []
                for address, where, write in event.accesses:
                    (cloned if address == block else others).append((address, where, write))
                yield Launch(current, ADDED, cloned, event.site)
                yield event._replace(accesses=others)
            else:
                yield event


ONLY_REPAIR: Final = {kind.only_for.id: kind for kind in (KeepAlive, Clone)}
"""By a rule's id: the kind of repair that alone fixes its races."""


# -- where the code goes


def _ordered_by_event(located: LocatedRace, *, host: bool) -> tuple[Insertion, ...]:
    """An event right after the first statement, and a wait before the second; none if the second
    may run without the first.
    """
    first, second = located.first, located.second
    if first is None or second is None or first.leaves or not located.first_always_runs_before:
        return ()
    if host and located.race.first.actor == HOST:
        return ()
    cuda = torch_name(first.file)
    name = free_name(second, _EVENT_NAME)
    if first.inner_blocks:  # written in one line: the next statement is not on the stream
        stream = first.inner_blocks[-1].stream
        record = f"{name} = {stream}.record_event()" if is_plain(stream) else ""
    else:
        record = f"{name} = {cuda}.current_stream().record_event()"
    if not record or second.inner_blocks:
        return ()
    wait = f"{name}.synchronize()" if host else f"{cuda}.current_stream().wait_event({name})"
    return first.after(record), second.before(wait)


def _wait_by_name(race: Race, waiter: int, source: int) -> Insertion | None:
    """A wait of ``waiter`` for all of ``source``, where the program has names for both."""
    context = race.context
    if context is None:
        return None
    crossed: str | None = ""  # the stream of a block between this place and the access
    blocks = list(context.blocks)
    for scope in context.scopes:
        if scope.code.co_name in _PARTS_OF_A_STATEMENT:
            continue
        found = statement(scope.file, scope.line)
        if found is None or scope.code.co_name == "<lambda>":
            return None  # a lambda does not run where its statement is
        cuda = torch_name(scope.file)
        current = f"{cuda}.current_stream()"
        # Before the statement itself.
        for block in found.inner_blocks:
            crossed = block.stream
            blocks = blocks[1:]
        mine = current if not crossed else _usable(crossed, scope, waiter)
        yours = _name(scope, source)
        if crossed and _is_current_outside(context, blocks, waiter, source):
            yours = current
        if mine and yours and mine != yours:
            return found.before(f"{mine}.wait_stream({yours})")
        # Before a block around it, outside of which the source stream is current.
        for block in found.blocks:
            if blocks and blocks[0] == (waiter, source) and is_plain(block.stream):
                outside = statement(scope.file, block.statement.lineno)
                if outside is not None and not outside.inner_blocks[1:]:
                    return outside.before(f"{block.stream}.wait_stream({current})")
            crossed = block.stream
            blocks = blocks[1:]
    return None


def _is_current_outside(
    context: RaceContext, left: list[tuple[int, int]], waiter: int, source: int
) -> bool:
    """Whether ``source`` is current outside of the blocks that were left."""
    count = len(context.blocks) - len(left)
    if not count:
        return False
    (innermost, _), (_, before) = context.blocks[0], context.blocks[count - 1]
    return before == source and innermost == waiter


def _usable(expression: str, scope: Scope, actor: int) -> str:
    """An expression of the scope for a stream: the block's own, or a name."""
    names = scope.streams.get(actor, ())
    if expression in names or (is_name(expression) and not names):
        return expression
    return names[0] if names else ""


def _name(scope: Scope, actor: int) -> str:
    names = scope.streams.get(actor, ())
    return names[0] if names else ""


def _text(found: StatementAt) -> str:
    lines = linecache.getlines(found.file)[found.line - 1 : found.end]
    return "".join(line if line.endswith("\n") else f"{line}\n" for line in lines)


def _prefixed(found: StatementAt, prefix: str) -> Insertion:
    """The statement with code before it in the same line."""
    text = found.indent + prefix + _text(found)[len(found.indent) :]
    return Insertion(found.file, found.line, text, found.end - found.line + 1)


def listing(insertions: tuple[Insertion, ...]) -> str:
    """The lines, each with its position."""
    lines = []
    for one in insertions:
        where = f"in place of line {one.line}" if one.replaces else f"before line {one.line}"
        code = one.text.rstrip("\n").splitlines()
        indent = len(code[0]) - len(code[0].lstrip())
        for at, line in enumerate(code):
            lines.append(f"{line[indent:]}  # {where}" if not at else line[indent:])
    return "\n".join(lines)
