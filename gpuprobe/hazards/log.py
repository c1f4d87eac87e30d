"""The log of a run's events, kept so that a fix can be verified by replaying them.

A run has an allocation, a free and a launch for nearly every operator. As they are, these are a
dozen objects each that Python's garbage collector visits again and again: it took a quarter of a
program's time. So they are kept as plain tuples of numbers and texts, of which the collector lets
go at its first visit. A launch is kept without the shapes of its tensors: only the report of a race
has those.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple

from gpuprobe.hazards.events import Allocation, Event, Free, Launch, Site
from gpuprobe.hazards.footprint import Footprint

LIMIT: Final = 50_000
"""Events of a log."""


class _Packed(NamedTuple):
    """How events of one kind are kept: ``pack`` makes the plain tuple, ``unpack`` the event."""

    pack: Callable[[EventLog, Any], tuple[Any, ...]]
    unpack: Callable[[EventLog, tuple[Any, ...]], Event]


class EventLog:
    """The events of a run in their order, until there are more than `LIMIT`: then it is empty and
    incomplete.
    """

    def __init__(self) -> None:
        self.complete = True
        self._events: list[Any] = []  # plain tuples, or events as they are
        self._sites: list[Site] = []
        self._site_numbers: dict[int, int] = {}  # by id

    def __len__(self) -> int:
        return len(self._events)

    def add(self, event: Event) -> None:
        """Add an event, if the log is complete."""
        if not self.complete:
            return
        if len(self._events) >= LIMIT:
            self.complete = False
            self._events.clear()
            self._sites.clear()
            self._site_numbers.clear()
            return
        kind = type(event)
        packed = _PACKED.get(kind)
        self._events.append(event if packed is None else packed.pack(self, event))

    def first(self, count: int) -> Iterator[Event]:
        """The first events of the log."""
        for entry in self._events[:count]:
            yield (
                entry if type(entry) is not tuple else _PACKED[_KINDS[entry[0]]].unpack(self, entry)
            )

    def _number_of(self, site: Site) -> int:
        number = self._site_numbers.get(id(site))
        if number is None:
            number = self._site_numbers[id(site)] = len(self._sites)
            self._sites.append(site)
        return number

    def _pack_allocation(self, event: Allocation) -> tuple[Any, ...]:
        return (0, *event)

    def _unpack_allocation(self, entry: tuple[Any, ...]) -> Event:
        return Allocation(*entry[1:])

    def _pack_free(self, event: Free) -> tuple[Any, ...]:
        address, site, waits = event
        return (1, address, self._number_of(site), waits)

    def _unpack_free(self, entry: tuple[Any, ...]) -> Event:
        _, address, site, waits = entry
        return Free(address, self._sites[site], waits)

    def _pack_launch(self, event: Launch) -> tuple[Any, ...]:
        actor, op, accesses, site, note = event
        flat: list[Any] = [2, actor, op if type(op) is str else op[0], self._number_of(site), note]
        for address, where, write in accesses:
            flat += (address, write, *where)
        return tuple(flat)

    def _unpack_launch(self, entry: tuple[Any, ...]) -> Event:
        _, actor, name, site, note, *flat = entry
        accesses = [
            (flat[at], Footprint(*flat[at + 2 : at + _ACCESS]), flat[at + 1])
            for at in range(0, len(flat), _ACCESS)
        ]
        return Launch(actor, name, accesses, self._sites[site], note)


_ACCESS: Final = 2 + len(Footprint._fields)
_KINDS: Final = (Allocation, Free, Launch)
_PACKED: Final[dict[type, _Packed]] = {
    Allocation: _Packed(EventLog._pack_allocation, EventLog._unpack_allocation),
    Free: _Packed(EventLog._pack_free, EventLog._unpack_free),
    Launch: _Packed(EventLog._pack_launch, EventLog._unpack_launch),
}
