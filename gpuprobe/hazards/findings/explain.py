"""From a race to a finding: both places, why the nearest wait did not help, the smallest fix.

A repair is verified if the log no longer has the race once it does exactly what the code does, at
the position that the code shows. Of several repairs, the first verified one is chosen.
"""

from __future__ import annotations

import linecache
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import Any, Final, NamedTuple

from gpuprobe.hazards import rules
from gpuprobe.hazards.accesses import Access, Race, Sync
from gpuprobe.hazards.engine import Engine
from gpuprobe.hazards.events import HOST
from gpuprobe.hazards.findings.fingerprint import fingerprint
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
from gpuprobe.hazards.findings.results import PROOF, Proof
from gpuprobe.hazards.findings.splitting import split
from gpuprobe.model.findings import Finding, Fix
from gpuprobe.model.place import Place

_MOST: Final = 24
"""Up to so many races, each repair is tried on all of them."""


def findings(engine: Engine, place: PlaceOf) -> list[Finding]:
    """The findings of an engine's races. Of races of one kind that the same repair fixes, one is
    reported, that of the repair that fixes most, and it lists the others.
    """
    definite = [race for race in engine.races if race.rule is not rules.LATENT]
    sites = {access.site for race in definite for access in (race.first, race.second)}
    # A place that races already is fixed first: that may make its latent hazard safe.
    races = [
        race
        for race in engine.races
        if race.rule is not rules.LATENT or race.first.site not in sites
    ]
    proposals = {id(race): propose(engine, race, place) for race in races}
    fixed = _fixed_together(engine, races, proposals)
    kinds = {id(race): (race.rule.id, race.rule.kind) for race in races}
    alike = {key: {one for one in gone if kinds[one] == kinds[key]} for key, gone in fixed.items()}
    left = {id(race): race for race in races}
    chosen: list[tuple[Race, list[Race]]] = []
    while left:
        race = max(left.values(), key=lambda one: len(alike[id(one)] & left.keys()))
        others = alike[id(race)] & left.keys() - {id(race)}
        chosen.append((race, [left[one] for one in left if one in others]))
        left = {key: one for key, one in left.items() if key != id(race) and key not in others}
    order = {id(race): at for at, race in enumerate(races)}
    chosen.sort(key=lambda pair: order[id(pair[0])])
    _share(chosen, fixed, proposals, place)
    return [
        _Report(engine, race, place).finding(proposals[id(race)], rest) for race, rest in chosen
    ]


def _fixed_together(
    engine: Engine, races: Sequence[Race], proposals: Mapping[int, Proposal]
) -> dict[int, set[int]]:
    """By race: those that its repair fixes, including itself."""
    fixed = {id(race): {id(race)} for race in races}
    for race in races if 1 < len(races) <= _MOST else ():
        repair, _, proof = proposals[id(race)]
        if proof is Proof.REMOVES and repair.shared:
            gone = engine.fixed_races(repair.log_everywhere, races)
            if any(one is race for one in gone):
                fixed[id(race)] = {id(one) for one in gone}
    return fixed


def _share(
    chosen: Sequence[tuple[Race, list[Race]]],
    fixed: Mapping[int, set[int]],
    proposals: dict[int, Proposal],
    place: PlaceOf,
) -> None:
    """Give findings of several kinds the same fix, if one of theirs fixes the others: as few
    changes as possible are to make.
    """
    groups = {id(race): {id(race), *map(id, others)} for race, others in chosen}
    done: set[int] = set()
    for race, _ in sorted(
        chosen, key=lambda pair: -sum(group <= fixed[id(pair[0])] for group in groups.values())
    ):
        if id(race) in done:
            continue
        done.add(id(race))
        repair, fix, _ = proposals[id(race)]
        here = place(race.second.site)
        if isinstance(repair, DeviceWait):
            continue  # the last resort: others have a better one
        for key, group in groups.items():
            if key not in done and group <= fixed[id(race)] and fix.diff and here is not None:
                done.add(key)
                text = f"the change for {race.rule.id}{_near(here, None)} also fixes this"
                proposals[key] = proposals[key]._replace(fix=replace(fix, text=f"{text}."))


def finding(engine: Engine, race: Race, place: PlaceOf, *, verify: bool = True) -> Finding:
    """The finding of one race. ``verify`` replays the log with its fix."""
    return _Report(engine, race, place).finding(propose(engine, race, place, verify=verify), ())


_PROOFS: Final = {
    Proof.REMOVES: f"{Proof.REMOVES.value}: with it the same run has no such race",
    Proof.FAILS: Proof.FAILS.value,
    Proof.UNCHECKED: f"{Proof.UNCHECKED.value}: the run is too long to replay",
}


@dataclass(frozen=True)
class _Report:
    """A race in words."""

    engine: Engine
    race: Race
    place: PlaceOf

    def finding(self, proposal: Proposal, others: Sequence[Race]) -> Finding:
        """The race with its fix, and the ``others`` that this fixes as well."""
        race, first, second = self.race, self.race.first, self.race.second
        here, there = self.place(second.site), self.place(first.site)
        subject = f"{_name(first)} -> {_name(second)}"
        evidence = [
            ("first", f"{_what(first)} on {self.stream(first.actor)}{_at(there)}"),
            ("second", f"{_what(second)} on {self.stream(second.actor)}{_at(here)}"),
            (PROOF, _PROOFS[proposal.proof]),
        ]
        for other in others:
            places = (self.place(other.first.site), self.place(other.second.site))
            text = " and ".join(f"{at.file}:{at.line}" for at in places if at is not None)
            evidence.append(("fixed by the same change", text))
        return Finding(
            rule=race.rule.id,
            kind=race.rule.kind,
            level=race.rule.level,
            message=f"{race.rule.title}: {_MESSAGES.get(race.rule.id, _Report.accesses)(self)}",
            evidence=tuple(evidence),
            location=here,
            related=() if there is None else (there,),
            fix=proposal.fix,
            count=1 + len(others),
            subject=subject,
            fingerprint=fingerprint(
                race.rule.id, race.rule.kind, subject, [source_of(there), source_of(here)]
            ),
        )

    def stream(self, actor: int) -> str:
        """A stream, with its name in the program, or the place where it was created."""
        name = stream_name(self.engine, actor)
        context = self.race.context
        if context is None or actor == HOST:
            return name
        for scope in context.scopes:
            if scope.streams.get(actor):
                return f"{name} ({scope.streams[actor][0]})"
        created = self.place(context.created.get(actor))
        return name if created is None else f"{name} (created{_near(created, None)})"

    def tensor(self) -> str:
        """The program's name for the tensor that races."""
        if self.race.context is not None:
            for scope in self.race.context.scopes:
                if scope.tensors:
                    return scope.tensors[0]
        return ""

    def accesses(self) -> str:
        """Two unordered accesses."""
        first, second = self.race.first, self.race.second
        here, there = self.place(second.site), self.place(first.site)
        name = self.tensor()
        return (
            f"{f'{name}, ' if name else ''}{_what(second)} on {self.stream(second.actor)}, "
            f"{_what(first)}{_near(there, here)} on {self.stream(first.actor)}, unsynchronised. "
            f"{self.why_unordered()}"
        )

    def freed_capture(self) -> str:
        """A graph that uses freed memory."""
        first, second = self.race.first, self.race.second
        here, freed = self.place(second.site), self.place(first.site)
        size = second.where.high - second.where.low
        return (
            f"{_what(second)} on {self.stream(second.actor)}, {size} bytes, freed"
            f"{_near(freed, here) if freed is not None else ' since'}."
        )

    def freed_memory(self) -> str:
        """Memory that was freed in use: where, and what uses it now."""
        race, first, second, place = self.race, self.race.first, self.race.second, self.place
        here = place(second.site)
        names = self.engine.tensor_names.get(first.site, ())
        tensor = names[0] if len(names) == 1 else "a tensor"
        made = place(race.history.allocated) if race.history is not None else None
        freed = place(race.history.freed) if race.history is not None else None
        text = f"{tensor}{f', allocated{_near(made, here)},' if made is not None else ''} was freed"
        text += f"{_near(freed, here)} while {self.stream(first.actor)} may still be using it "
        text += f"({_what(first)}{_near(place(first.site), here)})"
        if second.op != "free":
            use = f"{_what(second)}{_near(here, here)} on {self.stream(second.actor)}"
            if race.rule is rules.LATENT:
                text += f". The {use} could have been given the same memory"
            else:
                text += f". Its memory was given to another tensor: {use}"
        return f"{text}. {self.why_unordered()}"

    def why_unordered(self) -> str:
        """The nearest synchronisation, and why it does not order the two accesses."""
        first, second = self.race.first, self.race.second
        one, other = (stream_name(self.engine, access.actor) for access in (first, second))
        if wait := self._newest("wait", "host-wait", waiter=second.actor, source=first.actor):
            what = "write" if first.write else "read"
            where = _line(self.place(first.site))
            at = self._line_of(wait)
            return f"The wait at {at} covers only work queued before the {what} at {where}."
        if wait := self._newest("self-wait", waiter=second.actor):
            at = self._line_of(wait)
            return f"The wait at {at} makes a stream wait for itself, which has no effect."
        wait = self._newest("wait", "host-wait", waiter=first.actor, source=second.actor)
        # A wait before the first access is for its input.
        if wait and (first.actor == HOST or wait.waiter_time >= first.time):
            at = self._line_of(wait)
            return f"The wait at {at} is in the wrong direction: {one} waits for {other}."
        if wait := self._newest("wait-unrecorded", waiter=second.actor):
            at = self._line_of(wait)
            return f"The event waited for at {at} was never recorded, so the wait does nothing."
        record = self._newest("record", source=first.actor)
        if record and not self._is_awaited(record):
            when = "before" if record.source_time < first.time else "after"
            at = self._line_of(record)
            return f"The event recorded at {at}, {when} it, is not waited for by {other}."
        return f"Nothing makes {other} wait for it."

    def _newest(
        self, *kinds: str, waiter: int | None = None, source: int | None = None
    ) -> Sync | None:
        for sync in self.race.syncs[::-1]:
            if (
                sync.kind in kinds
                and waiter in (None, sync.waiter)
                and source in (None, sync.source)
            ):
                return sync
        return None

    def _is_awaited(self, record: Sync) -> bool:
        """Whether the second access's stream waits for a recorded event."""
        waiter = self.race.second.actor
        return any(
            sync.event == record.event and sync.kind == "wait" and sync.waiter == waiter
            for sync in self.race.syncs
        )

    def _line_of(self, sync: Sync) -> str:
        return _line(self.place(sync.site))


_MESSAGES: Final[Mapping[str, Callable[[_Report], str]]] = {
    rules.GRAPH_FREED.id: _Report.freed_capture,
    rules.USE_AFTER_FREE.id: _Report.freed_memory,
    rules.LATENT.id: _Report.freed_memory,
}
"""By a rule's id: what its message reports, if not two accesses."""


def source_of(place: Place | None) -> tuple[str, str, str]:
    """A place for a fingerprint: file, function, and the line's text."""
    if place is None:
        return "", "", ""
    # The bare name: Python before 3.11 has no other.
    function = place.function.rpartition(".")[2]
    return place.file, function, linecache.getline(place.file, place.line)


def _name(access: Access) -> str:
    if isinstance(access.op, str):
        return access.op
    name, _ = access.op
    return name


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


# -- the fix of a race


class Proposal(NamedTuple):
    """A repair as a fix for readers. ``proof`` is unchecked if the log does not reach that far."""

    repair: Repair
    fix: Fix
    proof: Proof


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
        proof = _PROOF_OF[engine.is_fixed(race, repair.log) if verify else None]
        if proof is not Proof.FAILS:
            return Proposal(repair, repair.fix(), proof)
    return Proposal(repairs[0], repairs[0].fix(), Proof.FAILS)


_PROOF_OF: Final = {True: Proof.REMOVES, False: Proof.FAILS, None: Proof.UNCHECKED}


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
