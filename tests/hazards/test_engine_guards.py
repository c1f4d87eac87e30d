"""The engine's guards and boundaries, one by one: each test fails if one of them is turned."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest

from gpuprobe.hazards.engine import Engine
from gpuprobe.hazards.events import (
    Allocation,
    DeviceSynchronize,
    Event,
    EventDestroy,
    EventRecord,
    EventWait,
    Free,
    GraphCapture,
    GraphReplay,
    HostAccess,
    Launch,
    Publication,
    RecordStream,
    StreamOrder,
    StreamSynchronize,
    StreamWait,
)
from gpuprobe.hazards.findings.explain import finding, propose
from gpuprobe.hazards.findings.repairs import Log
from gpuprobe.hazards.footprint import Footprint, of_tensor, overlap


class Run:
    """An engine with two streams, and 8 bytes at 0 that were allocated on the first."""

    def __init__(self, owner: int | None = None) -> None:
        self.engine = Engine()
        self.main = self.engine.stream(0, 0)
        self.side = self.engine.stream(0, 1)
        self.owner = self.main if owner is None else owner
        self.engine.apply(Allocation(0, 8, self.owner))

    def read(self, actor: int, low: int = 0, high: int = 8, **more: Any) -> None:
        self.use(actor, low, high, write=False, **more)

    def write(self, actor: int, low: int = 0, high: int = 8, **more: Any) -> None:
        self.use(actor, low, high, write=True, **more)

    def use(
        self, actor: int, low: int, high: int, *, write: bool, block: int = 0, **more: Any
    ) -> None:
        site, note = more.get("site"), more.get("note", "")
        accesses = [(block, Footprint(low, high), write)]
        self.engine.apply(Launch(actor, "op", accesses, site, note))

    def reuse(self, **more: Any) -> None:
        self.engine.apply(Free(0, **more))
        self.engine.apply(Allocation(0, 8, self.owner))

    @property
    def rules(self) -> list[str]:
        return [race.rule.id for race in self.engine.races]


@pytest.fixture
def run() -> Run:
    return Run()


@pytest.mark.parametrize(("waited", "rules"), [(0, []), (1, ["GP201"]), (2, ["GP201"])])
def test_the_host_waits_for_the_streams_of_one_device(
    run: Run, waited: int, rules: list[str]
) -> None:
    other = run.engine.stream(1, 0)
    run.write(run.main)
    run.engine.apply(DeviceSynchronize(waited))
    run.read(other)
    assert run.rules == rules


# -- memory that is used again


def test_a_new_owner_that_reads_first_and_then_writes(run: Run) -> None:
    run.read(run.side)
    run.reuse()
    run.read(run.main)  # two reads: no race yet
    assert run.rules == []
    run.write(run.main)
    assert run.rules == ["GP204"]


def test_a_new_owner_is_told_once_of_what_it_inherited(run: Run) -> None:
    run.write(run.side)
    run.reuse()
    run.read(run.main, site=1)
    run.write(run.main, site=2)
    assert [(race.rule.id, race.second.site) for race in run.engine.races] == [("GP204", 1)]


def test_an_inherited_access_that_was_waited_for_is_forgotten(run: Run) -> None:
    run.read(run.side)
    run.reuse()
    run.engine.apply(StreamWait(run.main, run.side))
    run.write(run.main)
    assert run.rules == []
    assert run.engine.kept == 1


def test_the_rest_of_the_bytes_is_still_inherited(run: Run) -> None:
    run.write(run.side, 4, 8)
    run.reuse()
    run.write(run.main, 0, 4)
    assert run.rules == []
    run.write(run.main, 4, 8)
    assert run.rules == ["GP204"]


@pytest.mark.parametrize(
    ("address", "size", "races"),
    [(0, 4, False), (4, 4, True), (0, 5, True), (8, 8, False), (7, 2, True), (0, 16, True)],
)
def test_bytes_go_to_whoever_gets_them(run: Run, address: int, size: int, races: bool) -> None:
    run.write(run.side, 4, 8)
    run.engine.apply(Free(0))
    run.engine.apply(Allocation(address, size))
    run.write(run.main, address, address + size, block=address)
    assert bool(run.rules) == races


def test_what_the_next_owner_does_not_cover_waits_for_others(run: Run) -> None:
    run.write(run.side, 0, 2, site="low")
    run.write(run.side, 6, 8, site="high")
    run.engine.apply(Free(0))
    for address, size in ((3, 2), (0, 3), (5, 3)):
        run.engine.apply(Allocation(address, size))
        run.write(run.main, address, address + size, block=address)
    assert [race.first.site for race in run.engine.races] == ["low", "high"]


def test_one_block_inherits_from_several(run: Run) -> None:
    run.engine.apply(Allocation(8, 8))
    run.write(run.side, 0, 8, site="one")
    run.write(run.side, 8, 16, site="two", block=8)
    run.engine.apply(Free(0))
    run.engine.apply(Free(8))
    run.engine.apply(Allocation(0, 16))
    run.write(run.main, 0, 16)
    assert [race.first.site for race in run.engine.races] == ["one", "two"]


def test_an_untouched_block_hands_on_what_it_inherited(run: Run) -> None:
    run.write(run.side)
    run.reuse()
    run.reuse()
    run.write(run.main)
    assert run.rules == ["GP204"]


def test_what_the_host_has_waited_for_is_not_handed_on(run: Run) -> None:
    run.write(run.side)
    run.engine.apply(StreamSynchronize(run.side))
    run.engine.apply(Free(0))
    assert run.engine.kept == 0


def test_pinned_memory_is_handed_on_when_it_is_idle(run: Run) -> None:
    run.read(run.side)
    run.reuse(waits=True)
    run.write(run.main)
    assert run.rules == []


@pytest.mark.parametrize(
    ("owner", "user", "silent"),
    [("main", "side", True), ("side", "side", False), (None, "side", True)],
)
def test_record_stream(owner: str | None, user: str, silent: bool) -> None:
    names = {"main": 1, "side": 2, None: -1}
    run = Run(names[owner])
    run.write(names[user])
    run.engine.apply(RecordStream(0, names[user]))
    run.reuse()
    run.write(run.main)
    assert (run.rules == []) == silent


def test_record_stream_of_another_stream_is_no_help(run: Run) -> None:
    third = run.engine.stream(0, 2)
    run.write(run.side)
    run.engine.apply(RecordStream(0, third))
    run.reuse()
    run.write(run.main)
    assert run.rules == ["GP204"]


def test_memory_from_before_the_watch_is_followed(run: Run) -> None:
    run.write(run.side, 100, 108, block=100)
    run.read(run.main, 100, 108, block=100)
    assert run.rules == ["GP201"]


# -- accesses of one block


@pytest.mark.parametrize(
    ("low", "high", "forgotten"), [(0, 8, True), (1, 8, False), (0, 7, False), (0, 9, True)]
)
def test_a_write_covers_what_lies_within(run: Run, low: int, high: int, forgotten: bool) -> None:
    run.write(run.side)
    run.engine.apply(StreamWait(run.main, run.side))
    run.write(run.main, low, high)
    third = run.engine.stream(0, 2)
    run.engine.apply(StreamWait(third, run.main))
    assert run.rules == []
    assert run.engine.kept == (1 if forgotten else 2)


def test_a_write_with_holes_covers_nothing(run: Run) -> None:
    rows = of_tensor(0, [2, 2], [4, 1], 1)
    assert rows is not None
    run.write(run.side, 0, 6)
    run.engine.apply(Launch(run.side, "op", [(0, rows, True)], None))
    run.read(run.main, 2, 4)
    assert run.rules == ["GP201"]


@pytest.mark.parametrize(("low", "races"), [(7, True), (8, False)])
def test_touching_is_not_overlapping(run: Run, low: int, races: bool) -> None:
    run.write(run.side, 0, 8)
    run.read(run.main, low, 16)
    assert bool(run.rules) == races


def test_the_newest_read_of_a_stream_counts(run: Run) -> None:
    run.read(run.side)
    run.engine.apply(StreamWait(run.main, run.side))
    run.read(run.side, site="again")
    run.write(run.main)
    assert [race.first.site for race in run.engine.races] == ["again"]


def test_reads_of_other_streams_and_bytes_are_kept_apart(run: Run) -> None:
    run.read(run.side, 0, 4)
    run.read(run.side, 4, 8)
    run.read(run.main, 0, 4)
    assert run.engine.kept == 3


def test_one_pair_of_places_is_one_race(run: Run) -> None:
    for _ in range(2):
        run.write(run.side, site="a")
        run.read(run.main, site="b")
    assert run.rules == ["GP201", "GP202"]
    run.read(run.main, site="c")
    assert run.rules == ["GP201", "GP202", "GP201"]


def test_places_that_all_have_seen_are_pruned(run: Run) -> None:
    engine = run.engine
    for at in range(8):
        run.read(run.side, at, at + 1)
    engine.apply(StreamSynchronize(run.side))
    run.read(run.main, 20, 21)
    run.read(run.side, 21, 22)  # the streams that have launched have seen what the host has
    assert engine.kept == 2


# -- clocks


def test_an_event_has_the_value_of_its_record(run: Run) -> None:
    run.write(run.side, site="before")
    run.engine.apply(EventRecord(5, run.side))
    run.write(run.side, site="after")
    run.engine.apply(EventWait(5, run.main))
    run.read(run.main)
    assert [race.first.site for race in run.engine.races] == ["after"]


def test_what_a_stream_has_seen_is_handed_on_with_it(run: Run) -> None:
    third = run.engine.stream(0, 2)
    run.write(third)
    run.engine.apply(StreamWait(run.side, third))
    run.engine.apply(EventRecord(5, run.side))
    run.engine.apply(EventWait(5, run.main))
    run.read(run.main)
    assert run.rules == []


def test_a_record_knows_what_the_host_has_waited_for(run: Run) -> None:
    run.write(run.side)
    run.engine.apply(StreamSynchronize(run.side))
    third = run.engine.stream(0, 2)
    run.engine.apply(EventRecord(5, third))
    run.engine.apply(EventWait(5, run.main))
    run.read(run.main)
    assert run.rules == []


def test_an_unrecorded_or_destroyed_event_is_no_wait(run: Run) -> None:
    run.engine.apply(EventWait(5, run.main))
    assert run.engine.unknown_events == 1
    run.write(run.side)
    run.engine.apply(EventRecord(5, run.side))
    run.engine.apply(EventDestroy(5))
    run.engine.apply(EventWait(5, run.main))
    assert run.engine.unknown_events == 2
    run.read(run.main)
    assert run.rules == ["GP201"]


def test_a_device_is_waited_for_alone(run: Run) -> None:
    other = run.engine.stream(1, 0)
    run.write(run.side, 0, 4)
    run.write(other, 4, 8)
    run.engine.apply(DeviceSynchronize(0))
    run.read(run.main)
    assert [race.first.actor for race in run.engine.races] == [other]


def test_waits_that_bring_nothing_new(run: Run) -> None:
    engine = run.engine
    engine.apply(EventRecord(4, run.side))
    engine.apply(EventWait(4, run.main, "of an idle stream"))
    run.write(run.side)
    engine.apply(EventRecord(5, run.side))
    engine.apply(EventWait(5, run.main, "needed"))
    engine.apply(EventWait(5, run.main, "again"))
    engine.apply(EventWait(5, run.main, "again"))
    engine.apply(EventWait(5, run.main, "needed"))
    engine.apply(EventWait(5, run.side, "itself"))
    assert engine.redundant == {"again": 2}
    assert [sync.site for sync in engine.self_waits] == ["itself"]


# -- which rule


def test_the_rule_says_who_and_what() -> None:
    def rule(*steps: tuple[str, str, str]) -> str:
        run = Run()
        for actor, kind, note in steps:
            write = kind == "write"
            if actor == "host":
                run.engine.apply(HostAccess(0, Footprint(0, 8), write, "op", None, note))
            else:
                run.use(getattr(run, actor), 0, 8, write=write, note=note)
        (found,) = run.rules
        return found

    assert rule(("side", "write", ""), ("main", "read", "")) == "GP201"
    assert rule(("side", "read", ""), ("main", "write", "")) == "GP202"
    assert rule(("side", "write", ""), ("main", "write", "")) == "GP203"
    assert rule(("side", "write", ""), ("host", "read", "")) == "GP205"
    assert rule(("side", "write", ""), ("host", "write", "")) == "GP206"
    assert rule(("side", "read", ""), ("host", "write", "")) == "GP206"
    assert rule(("side", "write", ""), ("host", "read", "numpy")) == "GP207"
    assert rule(("side", "write", "graph"), ("main", "read", "")) == "GP208"
    assert rule(("side", "write", ""), ("main", "read", "graph")) == "GP208"
    assert rule(("side", "write", "gradient"), ("main", "read", "")) == "GP209"
    assert rule(("side", "read", "gradient"), ("main", "write", "")) == "GP202"
    assert rule(("side", "read", "process"), ("main", "write", "")) == "GP212"
    assert rule(("side", "write", "process"), ("main", "read", "")) == "GP201"


@pytest.mark.parametrize("note", ["graph", "gradient", "process"])
def test_reused_memory_is_named_first(run: Run, note: str) -> None:
    run.write(run.side, note=note)
    run.reuse()
    run.write(run.main)
    assert run.rules == ["GP204"]


def test_reused_memory_is_named_first_on_the_host_too(run: Run) -> None:
    run.read(run.side)
    run.reuse()
    run.engine.apply(HostAccess(0, Footprint(0, 8), True, "op", None))
    assert run.rules == ["GP204"]


# -- graphs


def test_a_graph_replays_over_freed_memory(run: Run) -> None:
    engine = run.engine
    engine.apply(GraphCapture(0, [0]))
    assert engine.end_matters(0)
    assert not engine.end_matters(8)
    accesses = [(0, Footprint(0, 8), False)]
    engine.apply(GraphReplay(0, run.main, accesses, "replay"))
    assert run.rules == []
    engine.apply(Free(0, "freed"))
    engine.apply(Allocation(0, 8))
    engine.apply(StreamWait(run.side, run.main))
    run.write(run.side)
    engine.apply(StreamWait(run.main, run.side))
    engine.apply(GraphReplay(1, run.main, accesses, "another graph"))
    engine.apply(StreamWait(run.side, run.main))
    run.write(run.side)  # not in order with the next replay, which is not checked against it
    assert run.rules == []
    engine.apply(GraphReplay(0, run.main, accesses, "replay"))
    assert run.rules == ["GP211"]
    assert run.engine.races[0].first.site == "freed"
    (race,) = engine.races
    assert engine.is_fixed(race, propose(engine, race).repair.log) is True


def test_memory_freed_within_the_capture_is_lost(run: Run) -> None:
    run.engine.apply(GraphCapture(0, [64]))
    run.engine.apply(GraphReplay(0, run.main, [(64, Footprint(64, 72), False)], None))
    assert run.rules == ["GP211"]


# -- fixes


def unchanged(replay: Engine, log: Log) -> Iterator[Event]:
    """The log without any repair."""
    return (event for _, event in log)


def fixed(run: Run) -> tuple[str, bool | None]:
    (race,) = run.engine.races
    repair = propose(run.engine, race).repair
    return repair.code.partition("  #")[0], run.engine.is_fixed(race, repair.log)


def test_record_stream_is_proposed_for_a_stream_that_is_not_the_owner(run: Run) -> None:
    run.write(run.side)
    run.reuse()
    run.write(run.main)
    assert fixed(run) == ("tensor.record_stream(side)", True)


def test_the_owner_is_waited_for() -> None:
    run = Run(owner=2)
    run.write(run.side)
    run.engine.apply(RecordStream(0, run.side))
    run.reuse()
    run.write(run.main)
    assert fixed(run) == ("torch.cuda.current_stream().wait_stream(side)", True)


def test_a_fix_that_does_nothing_is_not_verified(run: Run) -> None:
    run.write(run.side)
    run.read(run.main)
    (race,) = run.engine.races
    assert run.engine.is_fixed(race, unchanged) is False


def test_a_fix_is_put_where_it_says(run: Run) -> None:
    """The event is recorded after the copy: later work on its stream is not waited for."""
    run.write(run.side, 0, 4, site="copy")
    run.write(run.side, 4, 8, site="later")
    run.engine.apply(HostAccess(0, Footprint(0, 4), False, "op", "host"))
    (race,) = run.engine.races
    repair = propose(run.engine, race).repair
    assert run.engine.is_fixed(race, repair.log) is True
    run.engine.apply(HostAccess(0, Footprint(4, 8), False, "op", "host 2"))
    first, second = run.engine.races
    assert run.engine.is_fixed(second._replace(first=first.first), repair.log) is True
    assert run.engine.is_fixed(second, propose(run.engine, first).repair.log) is False


def test_a_clone_is_read_where_it_is_sent(run: Run) -> None:
    receiver = run.engine.stream(-2, 0)
    run.engine.apply(StreamOrder(receiver, run.main))
    run.engine.apply(Launch(receiver, "receiver", [(0, Footprint(0, 8), False)], "put", "process"))
    run.write(run.main, site="write")
    code, verified = fixed(run)
    assert code == "queue.put(tensor.clone())"
    assert verified is True


def test_a_clone_does_not_order_what_another_stream_writes(run: Run) -> None:
    receiver = run.engine.stream(-2, 0)
    run.engine.apply(StreamOrder(receiver, run.main))
    run.engine.apply(Launch(receiver, "receiver", [(0, Footprint(0, 8), False)], "put", "process"))
    run.write(run.side, site="write")
    assert fixed(run)[1] is False


def test_why_it_is_not_ordered_names_the_nearest_wait(run: Run) -> None:
    run.engine.apply(EventRecord(5, run.side, "record"))
    run.engine.apply(EventWait(5, run.main, "wait"))
    run.write(run.side, site="first")
    run.read(run.main, site="second")
    (race,) = run.engine.races
    message = finding(run.engine, race, lambda site: None).message
    assert "covers only work queued before the write" in message


def test_a_gradient_is_written_where_it_is_published(run: Run) -> None:
    """A read elsewhere races with it, and not only a write."""
    run.engine.apply(Publication(run.side, "sum", [(0, Footprint(0, 8), True)], "backward"))
    run.read(run.main)
    (race,) = run.engine.races
    assert (race.rule.id, race.rule.kind) == ("GP209", "read-after-write")


@pytest.mark.parametrize("waits", [False, True])
def test_memory_that_a_new_block_could_have_been_given(run: Run, waits: bool) -> None:
    """It is loose until its own stream has waited, at the latest at the first use of that block."""
    run.read(run.side, site="side")
    run.engine.apply(Free(0))
    run.engine.apply(Allocation(64, 8, run.main))
    if waits:
        run.engine.apply(EventRecord(1, run.side))
        run.engine.apply(EventWait(1, run.main))
    run.use(run.main, 64, 72, write=True, block=64, site="main")
    assert run.rules == ([] if waits else ["GP213"])
    run.engine.at_end()
    assert run.rules == ([] if waits else ["GP213"])


def test_patterns_that_would_take_too_long_count_as_overlapping(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    even, odd = of_tensor(0, (8,), (2,), 1), of_tensor(1, (8,), (2,), 1)
    assert even is not None
    assert odd is not None
    assert not overlap(even, odd)
    monkeypatch.setattr("gpuprobe.hazards.footprint._MAX_STEPS", 0)
    assert overlap(even, odd)


class Line:
    """A place in the program that can be referred to weakly."""


def test_the_garbage_collector_does_not_visit_what_is_kept_of_a_block() -> None:
    run, line = Run(), Line()
    for _ in range(3):
        run.read(run.main, site=line)
        run.write(run.main, 2, 4, site=line)
    block = run.engine.block(0)
    assert block is not None
    assert len(block.writes) == 1
    assert len(block.uses()) > 1
    kept = [block, block.history, block.writes, *block.uses()]
    assert not any(map(gc.is_tracked, kept))
    run.reuse()
    inherited = run.engine.block(0)
    assert inherited is not None
    assert inherited.inherited
    assert not gc.is_tracked(inherited.inherited)
    # No cycle contains it, so that it ends without the collector.
    reference = weakref.ref(line)
    gc.disable()
    try:
        del run, line, block, kept, inherited
        assert reference() is None
    finally:
        gc.enable()
