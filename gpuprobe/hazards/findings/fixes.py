"""The smallest fix of a race: a change of the program's source, and the same of the engine's log.

A fix counts as verified when the race is gone after the log was done again with exactly what the
code does, where it says that it goes. Of several ways to mend a race, the first is taken that does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple

from gpuprobe.hazards import rules
from gpuprobe.hazards.accesses import HOST, Race
from gpuprobe.hazards.engine import Engine
from gpuprobe.hazards.findings import repairs
from gpuprobe.hazards.findings.code import unified_diff
from gpuprobe.hazards.findings.repairs import CodeChange, Sites
from gpuprobe.hazards.findings.splitting import split
from gpuprobe.hazards.log import ADDED, Edit, LogEntry
from gpuprobe.model.findings import Fix
from gpuprobe.model.place import Place

_EVENT: Final = 1 << 62  # of a fix: a number that no event of the program has


class Repair(NamedTuple):
    """``proof``: whether the race is gone with it; None where the log does not reach that far."""

    fix: Fix
    edit: Edit
    proof: bool | None
    how: str

    @property
    def text(self) -> str:
        """What to do, as a sentence."""
        return self.fix.text

    @property
    def code(self) -> str:
        """What to do, as code."""
        return self.fix.code


PlaceOf = Callable[[Any], "Place | None"]


def stream_name(engine: Engine, actor: int) -> str:
    """``the host``, ``the default stream``, or ``stream 3``, with the device if not the first."""
    if actor == HOST:
        return "the host"
    device, number = engine.names[actor]
    if device < -1:
        return "another process"
    if device < 0:
        return "a thread of collectives"
    if number < 0:
        name = "a stream of collectives"
    else:
        shown = engine.labels.get((device, number), number)
        name = "the default stream" if number == 0 else f"stream {shown}"
    return name if device == 0 else f"{name} of cuda:{device}"


def nowhere(site: Any) -> Place | None:
    """For sites that mean no line of a program."""
    return None


def repair(engine: Engine, race: Race, place: PlaceOf = nowhere, *, verify: bool = True) -> Repair:
    """The fix of a race. ``verify`` proves it by doing the log again with it."""
    at = repairs.sites(place(race.first.site), place(race.second.site))
    first: CodeChange | None = None
    for change in (*_changes(engine, race, at, place), _in_words(engine, race)):
        first = first or change
        proof = engine.without(race, _edit(engine, race, change.how)) if verify else None
        if proof is not False:
            break
    else:
        assert first is not None
        change = first
    # An edit is good for one time that the log is done again.
    return Repair(_fix(race, change), _edit(engine, race, change.how), proof, change.how)


def _fix(race: Race, change: CodeChange) -> Fix:
    text = _TEXTS.get(change.how, race.rule.remedy)
    if change.how == "wait" and race.later and race.rule is not rules.USE_AFTER_FREE:
        text += (
            ". It also waits for later work on that stream: if that costs overlap, record an "
            "event right after the first access, and wait for that"
        )
    return Fix(f"{text}.", change.code, unified_diff(change.insertions))


_UNSAFE: Final = (rules.USE_AFTER_FREE.id, rules.LATENT.id)
_TEXTS: Final = {
    "wait": "make the second stream wait for the first",
    "event": "record an event after the first access, and make the second stream wait for it",
    "host event": "record an event after the copy, and wait for it before the host uses the memory",
    "host wait": "wait for the stream of the copy before the host uses the memory",
    "device": "wait for the device; an event for the first access would keep the overlap, if the "
    "code can pass one",
    "record": "call record_stream on the tensor for the other stream",
    "work": "wait for the collective's result",
    "split": "split the statement, and wait before the rest of it uses the memory",
    "blocking": "copy without non_blocking: the same statement uses the memory",
}


def _changes(engine: Engine, race: Race, at: Sites, place: PlaceOf) -> Iterator[CodeChange]:
    """Ways to mend a race in the program's source, the best first."""
    for found in _candidates(engine, race, at, place):
        if found is not None:
            yield found


def _candidates(
    engine: Engine, race: Race, at: Sites, place: PlaceOf
) -> Iterator[CodeChange | None]:
    first, second = race.first, race.second
    names = engine.called.get(first.site, ())
    if race.context is not None and race.context.scopes:
        names = names or race.context.scopes[0].tensors
    if race.rule is rules.GRAPH_FREED:
        yield repairs.kept_alive(place(first.site), engine.called.get(first.site, ()))
        return
    if race.rule.id == rules.SHARED.id:
        yield repairs.cloned(at, engine.called.get(first.site, ()))
        return
    if _within_one_statement(race, at):
        yield from split(race, at)
        return  # nothing else can go between the two
    unsafe = race.rule.id in _UNSAFE
    if first.actor != HOST and _is_collective(engine, first.actor) and not unsafe:
        yield repairs.awaited_handle(race, at)
    if unsafe and first.actor != race.owner:
        yield repairs.recorded(at, names)
    if first.actor != HOST and _is_collective(engine, first.actor):
        pass  # the program has no name for its stream, and no event of it
    elif second.actor == HOST:
        yield repairs.ordered_by_event(race, at, host=True)
        yield repairs.host_wait(race, at)
    elif first.actor != HOST:
        waiter = _caller(engine, race)
        if race.later:
            yield repairs.ordered_by_event(race, at, host=False)
        yield repairs.wait_by_name(race, waiter, first.actor)
        yield repairs.ordered_by_event(race, at, host=False)
    several = engine.names[first.actor][0] not in (0, -1)
    yield repairs.whole_device(at, several=several)


def _within_one_statement(race: Race, at: Sites) -> bool:
    """Whether both accesses are of one statement, and of one time that it was run."""
    one, other = race.first.site, race.second.site
    return (
        at.first is not None
        and at.second is not None
        and at.first.node is at.second.node
        and one[0] is other[0]
        and bool(one[1] < other[1])
    )


def _caller(engine: Engine, race: Race) -> int:
    """The stream that has to wait before the second access: for a collective, that which it is
    called on.
    """
    actor = race.second.actor
    if not _is_collective(engine, actor) or race.context is None:
        return actor
    return race.context.current[0] if race.context.current else actor


def _is_collective(engine: Engine, actor: int) -> bool:
    return engine.names[actor][1] < 0


def _in_words(engine: Engine, race: Race) -> CodeChange:
    """The fix where the program's source is not known."""
    first, second = race.first, race.second
    if race.rule is rules.GRAPH_FREED:
        code = "static_input = tensor  # kept as long as the graph; refill it with copy_()"
        return CodeChange("keep", code)
    if race.rule.id == rules.SHARED.id:
        code = "queue.put(tensor.clone())  # or wait for an answer before the tensor is written"
        return CodeChange("clone", code)
    if first.actor != HOST and _is_collective(engine, first.actor):
        return CodeChange("work", "work.wait()  # work: the collective's result")
    stream = _expression(engine, race, first.actor, "side")
    if race.rule.id in _UNSAFE and first.actor != race.owner:
        return CodeChange("record", f"tensor.record_stream({stream})  # before it is dropped")
    if second.actor == HOST:
        code = f"done = {stream}.record_event()  # after the copy\ndone.synchronize()"
        return CodeChange("host event", code)
    if first.actor == HOST:
        return CodeChange("device", "torch.cuda.synchronize()")
    waiter = _expression(engine, race, second.actor, "other" if stream == "side" else "side")
    return CodeChange("wait", f"{waiter}.wait_stream({stream})")


def _expression(engine: Engine, race: Race, actor: int, name: str) -> str:
    """A stream as code, with the name that the innermost frame has for it."""
    context = race.context
    if context is not None:
        for scope in context.scopes:
            if scope.streams.get(actor):
                return scope.streams[actor][0]
        if actor in context.current:
            return "torch.cuda.current_stream()"
    return "torch.cuda.current_stream()" if engine.names[actor][1] == 0 else name


def _edit(engine: Engine, race: Race, how: str) -> Edit:
    """What a change of the source does to the log."""
    second = race.second
    if how == "work":
        return _host_wait(race) if second.actor == HOST else _work_wait(engine, race)
    if how == "wait":
        if _is_collective(engine, second.actor):
            return _wait_before_collective(engine, race)
        return _wait(race)
    if how == "event":
        return _event_wait(engine, race)
    made: dict[str, Callable[[], Edit]] = {
        "host event": lambda: _host_wait(race),
        "host wait": lambda: _synchronize(race),
        "split": lambda: _waits_at_once(race),
        "blocking": lambda: _waits_at_once(race),
        "device": lambda: _device(engine, race),
        "record": lambda: _record_stream(engine, race),
        "keep": lambda: _keep_alive(race),
        "clone": lambda: _clone(engine, race),
    }
    return made[how]()


SHARED: Final = ("wait", "event", "host wait", "host event", "device")
"""Changes that may cure other races than their own: what waits."""


def everywhere(engine: Engine, race: Race, how: str) -> Edit:
    """One of `SHARED` as an edit that is made each time that the lines are run."""
    first, second = race.first, race.second
    one = _edit(engine, race, how)
    waits: dict[str, Callable[[Engine, int], None]] = {
        "wait": lambda replay, actor: replay.stream_wait(actor, first.actor),
        "event": lambda replay, actor: replay.event_wait(_EVENT, actor),
        "host wait": lambda replay, actor: replay.stream_synchronize(first.actor),
        "host event": lambda replay, actor: replay.event_synchronize(_EVENT),
        "device": lambda replay, actor: replay.device_synchronize(engine.names[first.actor][0]),
    }
    records = how in ("event", "host event")
    launched = False

    def edit(replay: Engine, at: int, entry: LogEntry) -> bool:
        nonlocal launched
        if launched and records:
            replay.event_record(_EVENT, first.actor)
        site = _SITES.get(entry[0])
        launched = site is not None and entry[site] == first.site
        if site is not None and entry[site] == second.site and at != race.log_index:
            waits[how](replay, entry[1] if entry[0] == "launch" else HOST)
        return one(replay, at, entry)

    return edit


_SITES: Final = {"launch": 4, "host_access": 5}
"""Entries of the log that touch memory, and where in them the line is."""


# -- the same as changes of the log


def _wait(race: Race) -> Edit:
    """The second access's stream waits for the first's."""

    def edit(replay: Engine, at: int, entry: LogEntry) -> bool:
        if at == race.log_index:
            replay.stream_wait(race.second.actor, race.first.actor)
        return True

    return edit


def _event_wait(engine: Engine, race: Race) -> Edit:
    """An event is recorded right after the first access; the second's stream waits for it."""
    recorded = False
    waiter = _caller(engine, race)

    def edit(replay: Engine, at: int, entry: LogEntry) -> bool:
        nonlocal recorded
        if not recorded and replay.passed(race.first.actor, race.first.time):
            replay.event_record(_EVENT, race.first.actor)
            recorded = True
        if at == race.log_index:
            replay.event_wait(_EVENT, race.second.actor)
            replay.event_wait(_EVENT, waiter)
        return True

    return edit


def _work_wait(engine: Engine, race: Race) -> Edit:
    """The stream that is current before the second access waits for a collective."""
    return _event_wait(engine, race)


def _synchronize(race: Race) -> Edit:
    """The host waits for the first access's stream before the second."""

    def edit(replay: Engine, at: int, entry: LogEntry) -> bool:
        if at == race.log_index:
            replay.stream_synchronize(race.first.actor)
        return True

    return edit


def _device(engine: Engine, race: Race) -> Edit:
    """The host waits for all that was launched before the second access."""

    def edit(replay: Engine, at: int, entry: LogEntry) -> bool:
        if at == race.log_index:
            replay.device_synchronize(engine.names[race.first.actor][0])
        return True

    return edit


def _waits_at_once(race: Race) -> Edit:
    """The host waits for the first access's stream right after it."""
    waited = False

    def edit(replay: Engine, at: int, entry: LogEntry) -> bool:
        nonlocal waited
        if not waited and replay.passed(race.first.actor, race.first.time):
            replay.stream_synchronize(race.first.actor)
            waited = True
        return True

    return edit


def _host_wait(race: Race) -> Edit:
    """An event is recorded right after the first access; the host waits for it."""
    recorded = False

    def edit(replay: Engine, at: int, entry: LogEntry) -> bool:
        nonlocal recorded
        if not recorded and replay.passed(race.first.actor, race.first.time):
            replay.event_record(_EVENT, race.first.actor)
            recorded = True
        if at == race.log_index:
            replay.event_synchronize(_EVENT)
        return True

    return edit


def _record_stream(engine: Engine, race: Race) -> Edit:
    """The tensor of the first access is recorded for its stream before it is freed; where that is
    a collective's, for the stream that it was called on.
    """
    actor = race.first.actor
    if _is_collective(engine, actor):
        called = [
            entry[2]
            for entry in engine.log_before(race)
            if entry[0] == "stream_wait" and entry[1] == actor
        ]
        actor = called[-1] if called else actor

    def edit(replay: Engine, at: int, entry: LogEntry) -> bool:
        if entry[0] == "free" and replay.used(entry[1], race.first):
            replay.record_stream(entry[1], actor)
        return True

    return edit


def _wait_before_collective(engine: Engine, race: Race) -> Edit:
    """The stream that a collective is called on waits for the first access's."""
    calls = [
        (at, entry[2])
        for at, entry in enumerate(engine.log_before(race))
        if entry[0] == "stream_wait" and entry[1] == race.second.actor
    ]

    def edit(replay: Engine, at: int, entry: LogEntry) -> bool:
        if calls and at == calls[-1][0]:
            replay.stream_wait(calls[-1][1], race.first.actor)
        return True

    return edit


def _clone(engine: Engine, race: Race) -> Edit:
    """What is sent is a clone, made on the stream that was current where it was sent."""
    receiver, block = race.first.actor, race.block
    device = engine.names[race.second.actor][0]
    current = HOST

    def edit(replay: Engine, at: int, entry: LogEntry) -> bool:
        nonlocal current
        if entry[:2] == ("order", receiver) and engine.names[entry[2]][0] == device:
            current = entry[2]
        if entry[:2] != ("launch", receiver):
            return True
        _, actor, op, accesses, site, note = entry
        kept = [access for access in accesses if access[0] != block]
        cloned = [access for access in accesses if access[0] == block]
        replay.launch(current, ADDED, cloned, site)
        replay.launch(actor, op, kept, site, note)
        return False

    return edit


def _keep_alive(race: Race) -> Edit:
    """The tensor that a graph was captured with is not freed."""

    def edit(replay: Engine, at: int, entry: LogEntry) -> bool:
        again = entry[0] in ("alloc", "free") and entry[1] == race.block
        return not (again and replay.knows(race.block))

    return edit
