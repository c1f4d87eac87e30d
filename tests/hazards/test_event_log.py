"""The log of a run returns the events that it got, but for the shapes of launches."""

from __future__ import annotations

import gc

import pytest

from gpuprobe.hazards import log
from gpuprobe.hazards.events import Allocation, Event, EventRecord, Free, HostAccess, Launch
from gpuprobe.hazards.footprint import Footprint, whole
from gpuprobe.hazards.log import EventLog

ROWS = Footprint(512, 1024, 4, 16, ((128, 4),))


def events(number: int) -> list[Event]:
    site = f"line {number % 3}"
    accesses = [(512, ROWS, True), (4096 * number, whole(4096 * number, 4096 * number + 8), False)]
    return [
        Allocation(4096 * number, 512, 1, True),
        Launch(1, ("add", [(512, (4, 4))]), accesses, site, "gradient"),
        Launch(2, "declared kernel", [], None),
        EventRecord(number, 1, site),
        HostAccess(512, ROWS, True, ("copy", (4,)), site, "numpy"),
        Free(4096 * number, site, True),
    ]


def test_events_come_back_in_order() -> None:
    kept = EventLog()
    given = [event for number in range(20) for event in events(number)]
    for event in given:
        kept.add(event)
    assert len(kept) == len(given)
    for count in (0, 1, 17, len(given)):
        expected = [
            event._replace(op=event.op[0])
            if isinstance(event, Launch) and isinstance(event.op, tuple)
            else event
            for event in given[:count]
        ]
        returned = list(kept.first(count))
        assert returned == expected
        assert list(map(type, returned)) == list(map(type, expected))


def test_the_garbage_collector_does_not_visit_operators() -> None:
    kept = EventLog()
    for number in range(100):
        for event in events(number):
            if type(event) in (Allocation, Launch, Free):
                kept.add(event)
    for _ in range(3):  # a tuple is let go after those in it
        gc.collect()
    assert not any(map(gc.is_tracked, kept._events))


def test_a_log_that_is_full_is_incomplete(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log, "LIMIT", 10)
    kept = EventLog()
    for number in range(10):
        kept.add(events(number)[0])
    assert kept.complete
    kept.add(events(11)[0])
    assert not kept.complete
    assert len(kept) == 0
    kept.add(events(12)[0])
    assert len(kept) == 0
