"""The smallest fix of a race: code for the program, and the same change of the engine's log.

A fix counts as verified when the race is gone after the log was done again with exactly what the
code does, where it says that it goes: nothing else is tried in its place.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from gpuprobe.hazards import rules
from gpuprobe.hazards.accesses import HOST, Access, Race
from gpuprobe.hazards.engine import ADDED, Edit, Engine, LogEntry

_EVENT: Final = 1 << 62  # of a fix: a number that no event of the program has


class Repair(NamedTuple):
    """``text``: one sentence. ``code``: for before the second access, unless it says otherwise."""

    text: str
    code: str
    edit: Edit


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
        name = "the default stream" if number == 0 else f"stream {number}"
    return name if device == 0 else f"{name} of cuda:{device}"


def repair(engine: Engine, race: Race) -> Repair:
    """The fix of a race."""
    first, second = race.first, race.second
    text = f"{race.rule.remedy}."
    if engine.names[first.actor][1] < 0 and first.actor != HOST:
        edit = _host_wait(race) if second.actor == HOST else _wait(race)
        if second.actor != HOST and _is_collective(engine, second):
            edit = _wait_before_collective(engine, race)
        return Repair(text, "work.wait()  # work: what the collective returned", edit)
    if race.rule.id == rules.SHARED.id:
        code = "queue.put(tensor.clone())  # or wait for an answer before the tensor is written"
        return Repair(text, code, _clone(engine, race))
    if race.rule is rules.GRAPH_FREED:
        code = "static_input = tensor  # kept as long as the graph; refill it with copy_()"
        return Repair(text, code, _keep_alive(race))
    if race.rule.id == rules.USE_AFTER_FREE.id:
        if first.actor != race.owner:
            stream, note = _stream(engine, first.actor, notes=("before it is dropped",))
            return Repair(text, f"tensor.record_stream({stream}){note}", _record_stream(race))
        # The allocator ignores record_stream for the stream that the block belongs to.
        text = "make the stream that uses the new tensor wait for the one that used the freed one."
    elif second.actor == HOST:
        stream, note = _stream(engine, first.actor, notes=("after the copy",))
        code = f"event = {stream}.record_event(){note}\nevent.synchronize()"
        return Repair(text, code, _host_wait(race))
    several = engine.names[first.actor][0] != engine.names[second.actor][0]
    if _is_collective(engine, second):
        notes = ("before the collective is called",)
        stream, note = _stream(engine, first.actor, several, notes)
        note = note if stream == "side" else ""
        code = f"torch.cuda.current_stream().wait_stream({stream}){note}"
        return Repair(text, code, _wait_before_collective(engine, race))
    waiter = _expression(engine, second.actor, several, "side")
    source = _expression(engine, first.actor, several, "other" if waiter == "side" else "side")
    named = [
        f"{name}: {stream_name(engine, actor)}"
        for name, actor in ((waiter, second.actor), (source, first.actor))
        if name in ("side", "other")
    ]
    note = f"  # {', '.join(named)}" if named else ""
    return Repair(text, f"{waiter}.wait_stream({source}){note}", _wait(race))


def _is_collective(engine: Engine, access: Access) -> bool:
    return engine.names[access.actor][1] < 0


# -- streams in code


def _stream(
    engine: Engine, actor: int, several: bool = False, notes: tuple[str, ...] = ()
) -> tuple[str, str]:
    """A stream as code, and a comment: which one it is, and ``notes``."""
    stream = _expression(engine, actor, several, "side")
    if stream == "side":
        notes = (f"side: {stream_name(engine, actor)}", *notes)
    return stream, f"  # {'; '.join(notes)}" if notes else ""


def _expression(engine: Engine, actor: int, several: bool, name: str) -> str:
    """A stream as code that says the same inside a `with torch.cuda.stream(...)` and outside."""
    device, number = engine.names[actor]
    if number:
        return name
    return f"torch.cuda.default_stream({device if several or device else ''})"


# -- the same as changes of the log


def _wait(race: Race) -> Edit:
    """The second access's stream waits for the first's."""

    def edit(replay: Engine, at: int, entry: LogEntry) -> bool:
        if at == race.log_index:
            replay.stream_wait(race.second.actor, race.first.actor)
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


def _record_stream(race: Race) -> Edit:
    """The tensor of the first access is recorded for its stream before it is freed."""

    def edit(replay: Engine, at: int, entry: LogEntry) -> bool:
        if entry[0] == "free" and replay.used(entry[1], race.first):
            replay.record_stream(entry[1], race.first.actor)
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
