"""From a race to a finding: both places, why the nearest wait did not help, the smallest fix."""

from __future__ import annotations

import linecache
from collections.abc import Callable
from pathlib import PurePath
from typing import Any

from gpuprobe.hazards import rules
from gpuprobe.hazards.engine import HOST, Access, Engine, Race, Sync
from gpuprobe.hazards.known import fingerprint
from gpuprobe.model.findings import Finding, Fix
from gpuprobe.model.place import Place

__all__ = ["PlaceOf", "finding", "source_of", "stream_name", "why_not_ordered"]

PlaceOf = Callable[[Any], Place | None]
"""What a front end's opaque site means: a file and a line, or None."""


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
        return name if device == 0 else f"{name} of cuda:{device}"
    name = "the default stream" if number == 0 else f"stream {number}"
    return name if device == 0 else f"{name} of cuda:{device}"


def finding(engine: Engine, race: Race, place: PlaceOf, *, verify: bool = True) -> Finding:
    """The finding of one race. ``verify`` proves the fix by doing the log again with it."""
    first, second = race.first, race.second
    here, there = place(second.site), place(first.site)
    one, other = stream_name(engine, first.actor), stream_name(engine, second.actor)
    message = (
        f"{race.rule.title}: {_what(second)} on {other}, {_what(first)} on {one}"
        f"{_near(there, here)}, in no order. {why_not_ordered(engine, race, place)}"
    )
    if race.rule is rules.GRAPH_FREED:
        message = (
            f"{race.rule.title}: {_what(second)} on {other}, {_size(second)} bytes"
            f"{', freed' + _near(there, here) if there is not None else ', freed since'}."
        )
    proof = engine.proves(race) if verify else None
    subject = f"{_name(first)} -> {_name(second)}"
    return Finding(
        rule=race.rule.id,
        kind=race.rule.kind,
        level=race.rule.level,
        message=message,
        evidence=(
            ("first", f"{_what(first)} on {one}{_at(there)}"),
            ("second", f"{_what(second)} on {other}{_at(here)}"),
            (
                "fix verified",
                "not verified: the log does not reach that far"
                if proof is None
                else "yes: the log with this edge has no such race"
                if proof
                else "no",
            ),
        ),
        location=here,
        related=() if there is None else (there,),
        fix=Fix(f"{race.rule.remedy}.", _code(engine, race)),
        subject=subject,
        fingerprint=fingerprint(
            race.rule.id, race.rule.kind, subject, [source_of(there), source_of(here)]
        ),
    )


def source_of(place: Place | None) -> tuple[str, str, str]:
    """A place as a fingerprint knows it: file, function, and the line's text."""
    if place is None:
        return "", "", ""
    # The bare name: Python before 3.11 knows no other.
    function = place.function.rpartition(".")[2]
    return place.file, function, linecache.getline(place.file, place.line)


def _name(access: Access) -> str:
    return str(access.op[0] if isinstance(access.op, tuple) else access.op)


def _size(access: Access) -> int:
    return access.where.high - access.where.low


def _what(access: Access) -> str:
    if isinstance(access.op, tuple):
        name, shape = access.op
        if isinstance(shape, list):  # of several tensors, by their first byte
            shape = next((sizes for low, sizes in shape if low == access.where.low), ())
        text = f"{name} of {list(shape)}" if shape else name
    else:
        text = access.op
    return f"{'write' if access.write else 'read'} by {text}"


def _at(place: Place | None) -> str:
    return "" if place is None else f" at {place.file}:{place.line}"


def _near(place: Place | None, other: Place | None) -> str:
    """A place for a sentence about another one: the line, and the file if it differs."""
    if place is None:
        return ""
    if other is not None and other.file == place.file:
        return f" at line {place.line}"
    return f" at {PurePath(place.file).name}:{place.line}"


def _line(place: Place | None) -> str:
    return "an unknown line" if place is None else f"line {place.line}"


def why_not_ordered(engine: Engine, race: Race, place: PlaceOf) -> str:
    """Which synchronisation came nearest, and why it does not order the two."""
    first, second = race.first, race.second
    waits = [
        sync
        for sync in race.syncs
        if sync.waiter == second.actor and sync.source == first.actor and "wait" in sync.kind
    ]
    if waits:
        sync = waits[-1]
        return (
            f"The wait at {_line(place(sync.site))} is for what was queued before the "
            f"{'write' if first.write else 'read'} at {_line(place(first.site))}."
        )
    own = [sync for sync in race.syncs if sync.kind == "self-wait" and sync.waiter == second.actor]
    if own:
        return (
            f"The wait at {_line(place(own[-1].site))} is of a stream for itself, which orders "
            "nothing."
        )
    backwards = [
        sync
        for sync in race.syncs
        if sync.waiter == first.actor and sync.source == second.actor and "wait" in sync.kind
    ]
    if backwards:
        return (
            f"The wait at {_line(place(backwards[-1].site))} goes the other way: "
            f"{stream_name(engine, first.actor)} waits for {stream_name(engine, second.actor)}."
        )
    unrecorded = [
        sync
        for sync in race.syncs
        if sync.kind == "wait-unrecorded" and sync.waiter == second.actor
    ]
    if unrecorded:
        return (
            f"The event waited for at {_line(place(unrecorded[-1].site))} was never recorded, so "
            "the wait does nothing."
        )
    records = [sync for sync in race.syncs if sync.kind == "record" and sync.source == first.actor]
    if records and not _waited(records[-1], race):
        when = "before" if records[-1].time < first.time else "after"
        return (
            f"The event recorded at {_line(place(records[-1].site))}, {when} it, is not waited for "
            f"by {stream_name(engine, second.actor)}."
        )
    return f"Nothing makes {stream_name(engine, second.actor)} wait for it."


def _waited(record: Sync, race: Race) -> bool:
    return any(
        sync.event == record.event and sync.kind == "wait" and sync.waiter == race.second.actor
        for sync in race.syncs
    )


def _code(engine: Engine, race: Race) -> str:
    """The fix as code, to be put before the second access."""
    first, second = race.first, race.second
    one = stream_name(engine, first.actor)
    if first.actor != HOST and engine.names[first.actor][1] < 0:
        return "work.wait()  # work: what the collective returned"
    if race.rule.id == rules.SHARED.id:
        return "queue.put(tensor.clone())  # or wait for an answer before the tensor is written"
    if race.rule is rules.GRAPH_FREED:
        return "static_input = tensor  # kept beside the graph; refill it with copy_()"
    if race.rule.id == rules.USE_AFTER_FREE.id:
        stream = _expression(engine, first.actor, False, "side")
        which = f"side: {one}; " if stream == "side" else ""
        return f"tensor.record_stream({stream})  # {which}before it is dropped"
    if second.actor == HOST:
        stream = _expression(engine, first.actor, False, "side")
        which = f"side: {one}; " if stream == "side" else ""
        return f"event = {stream}.record_event()  # {which}after the copy\nevent.synchronize()"
    if first.actor == HOST:
        return "event.synchronize()  # of the copy that reads the buffer"
    several = engine.names[first.actor][0] != engine.names[second.actor][0]
    if engine.names[second.actor][1] < 0:
        source = _expression(engine, first.actor, several, "side")
        which = f"  # side: {one}; before the collective is called" if source == "side" else ""
        return f"torch.cuda.current_stream().wait_stream({source}){which}"
    waiter = _expression(engine, second.actor, several, "side")
    source = _expression(engine, first.actor, several, "other" if waiter == "side" else "side")
    named = [
        f"{name}: {stream_name(engine, actor)}"
        for name, actor in ((waiter, second.actor), (source, first.actor))
        if name in ("side", "other")
    ]
    return f"{waiter}.wait_stream({source})" + (f"  # {', '.join(named)}" if named else "")


def _expression(engine: Engine, actor: int, several: bool, name: str) -> str:
    """A stream as code that says the same inside a `with torch.cuda.stream(...)` and outside."""
    device, number = engine.names[actor]
    if number:
        return name
    return f"torch.cuda.default_stream({device if several or device else ''})"
