"""The smallest fix of a race.

A repair is verified if the log no longer has the race once it does exactly what the code does, at
the position that the code shows. Of several repairs, the first verified one is chosen.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from gpuprobe.hazards.accesses import Race
from gpuprobe.hazards.engine import Engine
from gpuprobe.hazards.events import HOST
from gpuprobe.hazards.findings.repairs import (
    ONLY_REPAIR,
    AwaitHandle,
    DeviceWait,
    HostWaits,
    HostWaitsForEvent,
    LocatedRace,
    PlaceOf,
    RecordTensor,
    Repair,
    Wait,
    WaitForEvent,
)
from gpuprobe.hazards.findings.splitting import split
from gpuprobe.model.findings import Fix
from gpuprobe.model.place import Place


class Proposal(NamedTuple):
    """A repair as a fix for readers. ``proof``: whether it removes the race; None if the log does
    not reach that far.
    """

    repair: Repair
    fix: Fix
    proof: bool | None


def nowhere(site: Any) -> Place | None:
    """Resolve a site of a run without a program: to None."""
    return None


def propose(
    engine: Engine, race: Race, place: PlaceOf = nowhere, *, verify: bool = True
) -> Proposal:
    """The fix of a race. ``verify`` replays the repaired log."""
    located = LocatedRace.locate(engine, race, place)
    repairs = [*_in_source(located), _in_words(located)]
    for repair in repairs:
        proof = engine.is_fixed(race, repair.log) if verify else None
        if proof is not False:
            return Proposal(repair, repair.fix(), proof)
    return Proposal(repairs[0], repairs[0].fix(), proof=False)


def _in_source(located: LocatedRace) -> Iterator[Repair]:
    """Repairs of the program's source, the best first."""
    race = located.race
    if only := ONLY_REPAIR.get(race.rule.id):
        yield from only.in_source(located)
    elif located.in_one_statement:
        yield from split(located)  # no line can go between the two
    else:
        if located.first_is_collective and not located.is_use_after_free:
            yield from AwaitHandle.in_source(located)
        if located.is_unrecorded:
            yield from RecordTensor.in_source(located)
        yield from _waits(located)
        yield from DeviceWait.in_source(located)


def _waits(located: LocatedRace) -> Iterator[Repair]:
    """Waits for the first access's stream; none for a collective's, which the program can neither
    name nor record events on.
    """
    race = located.race
    if located.first_is_collective:
        return
    if race.second.actor == HOST:
        yield from HostWaitsForEvent.in_source(located)
        yield from HostWaits.in_source(located)
    elif race.first.actor != HOST:
        if race.later:
            yield from WaitForEvent.in_source(located)
        yield from Wait.in_source(located)
        yield from WaitForEvent.in_source(located)


def _in_words(located: LocatedRace) -> Repair:
    """The repair of a race whose source is unknown."""
    race = located.race
    kind: type[Repair] = Wait
    if only := ONLY_REPAIR.get(race.rule.id):
        kind = only
    elif located.first_is_collective:
        kind = AwaitHandle
    elif located.is_unrecorded:
        kind = RecordTensor
    elif race.second.actor == HOST:
        kind = HostWaitsForEvent
    elif race.first.actor == HOST:
        kind = DeviceWait
    return kind.in_words(located)


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
