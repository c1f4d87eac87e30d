"""From a race to a finding: both places, why the nearest wait did not help, the smallest fix."""

from __future__ import annotations

import linecache
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import PurePath
from typing import Any, Final

from gpuprobe.hazards import rules
from gpuprobe.hazards.accesses import HOST, Access, Race, Sync
from gpuprobe.hazards.engine import Engine
from gpuprobe.hazards.findings.fixes import SHARED, Repair, everywhere, repair, stream_name
from gpuprobe.hazards.findings.known import fingerprint
from gpuprobe.model.findings import Finding
from gpuprobe.model.place import Place

PlaceOf = Callable[[Any], Place | None]
"""What a front end's opaque site means: a file and a line, or None."""


_MOST: Final = 24
"""Races among which those are looked for that one fix cures."""


def findings(engine: Engine, place: PlaceOf) -> list[Finding]:
    """The findings of an engine's races: of those of one kind that the same fix cures, one is
    reported, that of the fix that cures most, and it names the others.
    """
    sites = {race.first.site for race in engine.races if race.rule is not rules.LATENT}
    sites |= {race.second.site for race in engine.races if race.rule is not rules.LATENT}
    # What races already is mended first: it may be over then before its memory is freed.
    races = [
        race
        for race in engine.races
        if race.rule is not rules.LATENT or race.first.site not in sites
    ]
    repaired = {id(race): repair(engine, race, place) for race in races}
    cures = _cures(engine, races, repaired)
    kinds = {id(race): (race.rule.id, race.rule.kind) for race in races}
    alike = {key: {one for one in gone if kinds[one] == kinds[key]} for key, gone in cures.items()}
    left = {id(race): race for race in races}
    chosen: list[tuple[Race, list[Race]]] = []
    while left:
        race = max(left.values(), key=lambda one: len(alike[id(one)] & left.keys()))
        cured = alike[id(race)] & left.keys() - {id(race)}
        chosen.append((race, [left[one] for one in left if one in cured]))
        left = {key: one for key, one in left.items() if key != id(race) and key not in cured}
    order = {id(race): at for at, race in enumerate(races)}
    chosen.sort(key=lambda pair: order[id(pair[0])])
    _share(chosen, cures, repaired, place)
    return [_finding(engine, race, place, repaired[id(race)], others) for race, others in chosen]


def _cures(
    engine: Engine, races: Sequence[Race], repaired: Mapping[int, Repair]
) -> dict[int, set[int]]:
    """By a race: those that are gone with its fix, itself among them."""
    cures = {id(race): {id(race)} for race in races}
    for race in races if 1 < len(races) <= _MOST else ():
        found = repaired[id(race)]
        if found.proof and found.how in SHARED:
            gone = engine.cured(everywhere(engine, race, found.how), races)
            if any(one is race for one in gone):
                cures[id(race)] = {id(one) for one in gone}
    return cures


def _share(
    chosen: Sequence[tuple[Race, list[Race]]],
    cures: Mapping[int, set[int]],
    repaired: dict[int, Repair],
    place: PlaceOf,
) -> None:
    """Give findings of several kinds the same fix, where one of theirs cures the others: few
    changes are to be made.
    """
    groups = {id(race): {id(race), *map(id, others)} for race, others in chosen}
    mended: set[int] = set()
    for race, _ in sorted(
        chosen, key=lambda pair: -sum(group <= cures[id(pair[0])] for group in groups.values())
    ):
        if id(race) in mended:
            continue
        mended.add(id(race))
        fix, here = repaired[id(race)].fix, place(race.second.site)
        if repaired[id(race)].how == "device":
            continue  # the last resort: others have something better
        for key, group in groups.items():
            if key not in mended and group <= cures[id(race)] and fix.diff and here is not None:
                mended.add(key)
                text = f"the change for {race.rule.id}{_near(here, None)} also fixes this"
                repaired[key] = repaired[key]._replace(fix=replace(fix, text=f"{text}."))


def finding(engine: Engine, race: Race, place: PlaceOf, *, verify: bool = True) -> Finding:
    """The finding of one race. ``verify`` proves the fix by doing the log again with it."""
    return _finding(engine, race, place, repair(engine, race, place, verify=verify), ())


def _finding(
    engine: Engine, race: Race, place: PlaceOf, repaired: Repair, others: Sequence[Race]
) -> Finding:
    first, second = race.first, race.second
    here, there = place(second.site), place(first.site)
    one = _stream(engine, race, place, first.actor)
    other = _stream(engine, race, place, second.actor)
    name = _called(race)
    about = f"{name}, " if name else ""
    message = (
        f"{race.rule.title}: {about}{_what(second)} on {other}, {_what(first)}"
        f"{_near(there, here)} on {one}, unsynchronised. {why_not_ordered(engine, race, place)}"
    )
    if race.rule is rules.GRAPH_FREED:
        message = (
            f"{race.rule.title}: {_what(second)} on {other}, {_size(second)} bytes"
            f"{', freed' + _near(there, here) if there is not None else ', freed since'}."
        )
    elif race.rule in (rules.USE_AFTER_FREE, rules.LATENT):
        message = f"{race.rule.title}: {_life(engine, race, place, here, one, other)}"
    subject = f"{_name(first)} -> {_name(second)}"
    evidence = [
        ("first", f"{_what(first)} on {one}{_at(there)}"),
        ("second", f"{_what(second)} on {other}{_at(here)}"),
        ("fix verified", _PROOFS[repaired.proof]),
    ]
    for race_too in others:
        places = (place(race_too.first.site), place(race_too.second.site))
        evidence.append(("fixed by the same change", " and ".join(_at(p)[4:] for p in places if p)))
    return Finding(
        rule=race.rule.id,
        kind=race.rule.kind,
        level=race.rule.level,
        message=message,
        evidence=tuple(evidence),
        location=here,
        related=() if there is None else (there,),
        fix=repaired.fix,
        count=1 + len(others),
        subject=subject,
        fingerprint=fingerprint(
            race.rule.id, race.rule.kind, subject, [source_of(there), source_of(here)]
        ),
    )


_PROOFS: Final = {
    True: "yes: with it the same run has no such race",
    False: "no",
    None: "not checked: the run is too long to replay",
}


def _stream(engine: Engine, race: Race, place: PlaceOf, actor: int) -> str:
    """A stream, with what the program calls it, or where it was made."""
    name = stream_name(engine, actor)
    if race.context is None or actor == HOST:
        return name
    for scope in race.context.scopes:
        if scope.streams.get(actor):
            return f"{name} ({scope.streams[actor][0]})"
    made = place(race.context.created.get(actor))
    return name if made is None else f"{name} (created{_near(made, None)})"


def _called(race: Race) -> str:
    """What the program calls the tensor of a race."""
    if race.context is not None:
        for scope in race.context.scopes:
            if scope.tensors:
                return scope.tensors[0]
    return ""


def _life(
    engine: Engine, race: Race, place: PlaceOf, here: Place | None, one: str, other: str
) -> str:
    """What was freed, where, and who has its memory now."""
    first, second = race.first, race.second
    names = engine.called.get(first.site, ())
    freed = names[0] if len(names) == 1 else "a tensor"
    history = race.history
    made = place(history.allocated) if history is not None else None
    gone = place(history.freed) if history is not None else None
    text = f"{freed}{', allocated' + _near(made, here) + ',' if made is not None else ''} was freed"
    text += f"{_near(gone, here)} while {one} may still be using it "
    text += f"({_what(first)}{_near(place(first.site), here)})"
    if second.op != "free":
        at = _near(here, here)
        if race.rule is rules.LATENT:
            text += f". The {_what(second)}{at} on {other} could have been given the same memory"
        else:
            text += f". Its memory was given to another tensor: {_what(second)}{at} on {other}"
    return f"{text}. {why_not_ordered(engine, race, place)}"


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
        return f"The wait at {at(wait)} covers only work queued before the {what} at {where}."
    if wait := newest("self-wait", waiter=second.actor):
        return f"The wait at {at(wait)} makes a stream wait for itself, which has no effect."
    wait = newest("wait", "host-wait", waiter=first.actor, source=second.actor)
    if wait and (first.actor == HOST or wait.mine >= first.time):  # else it is for its input
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
