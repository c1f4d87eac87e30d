"""From a race to a finding: both places, why the nearest wait did not help, the smallest fix."""

from __future__ import annotations

import linecache
from collections.abc import Callable
from pathlib import PurePath
from typing import Any

from gpuprobe.hazards import rules
from gpuprobe.hazards.accesses import Access, Race, Sync
from gpuprobe.hazards.engine import Engine
from gpuprobe.hazards.findings.fixes import repair, stream_name
from gpuprobe.hazards.findings.known import fingerprint
from gpuprobe.model.findings import Finding, Fix
from gpuprobe.model.place import Place

PlaceOf = Callable[[Any], Place | None]
"""What a front end's opaque site means: a file and a line, or None."""


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
    fix = repair(engine, race)
    proof = engine.without(race, fix.edit) if verify else None
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
                else "yes: with it the same run has no such race"
                if proof
                else "no",
            ),
        ),
        location=here,
        related=() if there is None else (there,),
        fix=Fix(fix.text, fix.code),
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
    one, other = (stream_name(engine, access.actor) for access in (first, second))

    def newest(*kinds: str, waiter: int | None = None, source: int | None = None) -> Sync | None:
        for sync in race.syncs[::-1]:
            if (
                sync.kind in kinds
                and waiter in (None, sync.waiter)
                and source in (None, sync.source)
            ):
                return sync
        return None

    def at(sync: Sync) -> str:
        return _line(place(sync.site))

    if wait := newest("wait", "host-wait", waiter=second.actor, source=first.actor):
        what = "write" if first.write else "read"
        where = _line(place(first.site))
        return f"The wait at {at(wait)} is for what was queued before the {what} at {where}."
    if wait := newest("self-wait", waiter=second.actor):
        return f"The wait at {at(wait)} is of a stream for itself, which orders nothing."
    if wait := newest("wait", "host-wait", waiter=first.actor, source=second.actor):
        return f"The wait at {at(wait)} goes the other way: {one} waits for {other}."
    if wait := newest("wait-unrecorded", waiter=second.actor):
        return f"The event waited for at {at(wait)} was never recorded, so the wait does nothing."
    record = newest("record", source=first.actor)
    if record and not any(
        sync.event == record.event and sync.kind == "wait" and sync.waiter == second.actor
        for sync in race.syncs
    ):
        when = "before" if record.time < first.time else "after"
        return f"The event recorded at {at(record)}, {when} it, is not waited for by {other}."
    return f"Nothing makes {other} wait for it."
