"""The engine alone: against a happens-before oracle, and its memory."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from examples import examples
from gpuprobe.hazards.engine import Engine
from gpuprobe.hazards.events import (
    HOST,
    Allocation,
    DeviceSynchronize,
    EventRecord,
    EventSynchronize,
    EventWait,
    Free,
    HostAccess,
    Launch,
    StreamSynchronize,
)
from gpuprobe.hazards.findings.explain import propose
from gpuprobe.hazards.footprint import Footprint, of_tensor, overlap, whole

STREAMS, BLOCKS, EVENTS = 3, 3, 2
SIZE = 8


@st.composite
def programs(draw: Any) -> list[tuple[Any, ...]]:
    steps = st.one_of(
        st.tuples(
            st.just("launch"),
            st.integers(0, STREAMS - 1),
            st.integers(0, BLOCKS - 1),
            st.integers(0, SIZE - 1),
            st.integers(1, SIZE),
            st.booleans(),
        ),
        st.tuples(st.just("record"), st.integers(0, EVENTS - 1), st.integers(0, STREAMS - 1)),
        st.tuples(st.just("wait"), st.integers(0, EVENTS - 1), st.integers(0, STREAMS - 1)),
        st.tuples(st.just("event_sync"), st.integers(0, EVENTS - 1)),
        st.tuples(st.just("stream_sync"), st.integers(0, STREAMS - 1)),
        st.tuples(st.just("device_sync")),
    )
    return draw(st.lists(steps, max_size=25))  # type: ignore[no-any-return]


def run_engine(program: list[tuple[Any, ...]]) -> set[tuple[int, int]]:
    """Pairs of launches (by their place in the program) that the engine calls a race."""
    engine = Engine()
    streams = [engine.stream(0, number) for number in range(STREAMS)]
    for block in range(BLOCKS):
        engine.apply(Allocation(1000 * block, SIZE))
    for at, step in enumerate(program):
        kind = step[0]
        if kind == "launch":
            _, stream, block, low, length, write = step
            where = Footprint(1000 * block + low, 1000 * block + min(SIZE, low + length))
            engine.apply(Launch(streams[stream], "op", [(1000 * block, where, write)], at))
        elif kind == "record":
            engine.apply(EventRecord(step[1], streams[step[2]], at))
        elif kind == "wait":
            engine.apply(EventWait(step[1], streams[step[2]], at))
        elif kind == "event_sync":
            engine.apply(EventSynchronize(step[1], at))
        elif kind == "stream_sync":
            engine.apply(StreamSynchronize(streams[step[1]], at))
        else:
            engine.apply(DeviceSynchronize(0, at))
    return {(race.first.site, race.second.site) for race in engine.races}


def _precedes(edges: dict[int, set[int]], first: int, second: int) -> bool:
    """Whether there is a path between two launches."""
    todo, done = [second], set()
    while todo:
        node = todo.pop()
        if node == first:
            return True
        if node not in done:
            done.add(node)
            todo.extend(edges.get(node, ()))
    return False


def oracle(program: list[tuple[Any, ...]]) -> set[tuple[int, int]]:
    """All racing pairs, from reachability in the graph of what precedes what."""
    edges: dict[int, set[int]] = {}
    last: dict[int, int] = {}  # stream -> its newest node
    host: set[int] = set()  # nodes the host has seen
    waiting: dict[int, set[int]] = {stream: set() for stream in range(STREAMS)}
    events: dict[int, set[int]] = {}
    launches: list[tuple[int, tuple[Any, ...]]] = []

    def seen_by(stream: int) -> set[int]:
        return ({last[stream]} if stream in last else set()) | waiting[stream] | host

    for at, step in enumerate(program):
        kind = step[0]
        if kind == "launch":
            edges[at] = seen_by(step[1])
            last[step[1]] = at
            launches.append((at, step))
        elif kind == "record":
            events[step[1]] = seen_by(step[2])
        elif kind == "wait":
            waiting[step[2]] |= events.get(step[1], set())
        elif kind == "event_sync":
            host |= events.get(step[1], set())
        elif kind == "stream_sync":
            host |= seen_by(step[1])
        else:
            for stream in range(STREAMS):
                host |= seen_by(stream)

    races = set()
    for (one, a), (other, b) in itertools.combinations(launches, 2):
        same = a[2] == b[2] and a[3] < min(SIZE, b[3] + b[4]) and b[3] < min(SIZE, a[3] + a[4])
        if same and (a[5] or b[5]) and not _precedes(edges, one, other):
            races.add((one, other))
    return races


@settings(max_examples=examples(400), deadline=None)
@given(programs())
def test_it_finds_races_where_the_oracle_does(program: list[tuple[Any, ...]]) -> None:
    found, expected = run_engine(program), oracle(program)
    assert found <= expected  # nothing that is ordered is reported
    # A later launch that races at all is reported, if not with each of several earlier ones.
    assert {second for _, second in found} == {
        second for first, second in expected if not _shadowed(program, expected, first, second)
    }


def _shadowed(
    program: list[tuple[Any, ...]], races: set[tuple[int, int]], first: int, second: int
) -> bool:
    """The earlier access was covered in between by a write, or as a read by one of its own stream:
    the engine then knows of the newer one only, and has reported that pair if it raced itself.
    """
    _, stream, block, low, length, write = program[first]
    high = min(SIZE, low + length)
    for at in range(first + 1, second):
        step = program[at]
        if step[0] == "launch" and step[2] == block:
            covers = step[3] <= low and min(SIZE, step[3] + step[4]) >= high
            if covers and (step[5] or (step[1] == stream and not write)):
                return True
    return False


tensors = st.tuples(
    st.integers(0, 40),
    st.lists(st.tuples(st.integers(1, 4), st.integers(0, 9)), max_size=3),
)


def _bytes(start: int, dims: list[tuple[int, int]], item: int) -> set[int]:
    found = set()
    for index in itertools.product(*(range(size) for size, _ in dims)):
        at = start + item * sum(i * stride for i, (_, stride) in zip(index, dims, strict=True))
        found.update(range(at, at + item))
    return found


@settings(max_examples=examples(400), deadline=None)
@given(tensors, tensors)
def test_footprints_meet_where_they_have_a_byte_in_common(one: Any, other: Any) -> None:
    item = 2
    prints = []
    for start, dims in (one, other):
        made = of_tensor(start, [size for size, _ in dims], [stride for _, stride in dims], item)
        assert made is not None
        prints.append(made)
    common = bool(_bytes(*one, item) & _bytes(*other, item))
    assert overlap(*prints) == common
    assert overlap(*reversed(prints)) == common


def test_columns_are_apart() -> None:
    left = of_tensor(0, [10, 5], [10, 1], 4)
    right = of_tensor(20, [10, 5], [10, 1], 4)
    assert left is not None
    assert right is not None
    assert not overlap(left, right)
    assert of_tensor(0, [0, 5], [5, 1], 4) is None


@pytest.mark.parametrize(
    ("sizes", "strides", "shift"),
    [
        ((8192, 32), (64, 1), 32),  # columns of a tall matrix
        ((64, 128, 16), (4096, 32, 2), 1),  # every second of the last dimension
        ((64, 64, 64), (16384, 128, 1), 64),  # blocks of a batch of matrices
    ],
)
def test_large_patterns_are_compared_exactly(
    sizes: tuple[int, ...], strides: tuple[int, ...], shift: int
) -> None:
    one, other, same = (of_tensor(4 * at, sizes, strides, 4) for at in (0, shift, shift - 1))
    assert one is not None
    assert other is not None
    assert same is not None
    assert not overlap(one, other)
    assert not overlap(other, one)
    assert overlap(other, same) == (sizes[-1] > 16)


def test_many_places_of_one_block_are_kept_apart() -> None:
    """300 slots of a cache, each with an event of its own."""
    engine = Engine()
    main, side = engine.stream(0, 0), engine.stream(0, 1)
    engine.apply(Allocation(0, 300))
    for at in range(300):
        engine.apply(Launch(side, "fill", [(0, Footprint(at, at + 1), True)], "fill"))
        engine.apply(EventRecord(at, side))
    for at in range(0, 300, 2):
        engine.apply(EventWait(at, main))
        engine.apply(Launch(main, "read", [(0, Footprint(at, at + 1), False)], "read"))
    assert engine.races == []
    engine.apply(Launch(main, "read", [(0, Footprint(299, 300), False)], "early"))
    assert [race.second.site for race in engine.races] == ["early"]


def test_places_of_one_block_are_bounded() -> None:
    engine = Engine(keep_log=False)
    main, side = engine.stream(0, 0), engine.stream(0, 1)
    engine.apply(Allocation(0, 20_000))
    for at in range(0, 20_000, 2):
        engine.apply(Launch(side, "fill", [(0, Footprint(at, at + 1), True)], "fill"))
    assert engine.kept < 5_000
    for at in range(0, 20_000, 501):  # none of them is forgotten
        engine.apply(Launch(main, "read", [(0, Footprint(2 * (at // 2), at + 1), False)], at))
    assert len(engine.races) == len(range(0, 20_000, 501))


def test_memory_stays_bounded() -> None:
    engine = Engine()
    main, side = engine.stream(0, 0), engine.stream(0, 1)
    weight, where = 0, Footprint(0, 4096)
    engine.apply(Allocation(weight, 4096))
    for at in range(30_000):
        address = 10_000 + 512 * (at % 50)
        engine.apply(Allocation(address, 512))
        access = [(weight, where, False), (address, Footprint(address, address + 512), True)]
        engine.apply(Launch(main if at % 3 else side, "op", access, "line"))
        engine.apply(Free(address))
        if at % 10 == 0:
            engine.apply(EventRecord(1, main, "line"))
            engine.apply(EventWait(1, side, "line"))
    assert engine.kept < 500


def test_the_log_has_an_end_and_says_so() -> None:
    engine = Engine()
    main, side = engine.stream(0, 0), engine.stream(0, 1)
    engine.apply(Allocation(0, 8))
    for _ in range(50_001):
        engine.apply(Launch(main, "op", [], None))
    engine.apply(Launch(main, "write", [(0, Footprint(0, 8), True)], "one"))
    engine.apply(Launch(side, "read", [(0, Footprint(0, 8), False)], "two"))
    (race,) = engine.races
    assert engine.is_fixed(race, propose(engine, race).repair.log) is None


@pytest.mark.parametrize("write", [True, False])
def test_the_host_is_an_actor(write: bool) -> None:
    engine = Engine()
    main = engine.stream(0, 0)
    engine.apply(Allocation(0, 8))
    where = Footprint(0, 8)
    engine.apply(Launch(main, "copy", [(0, where, not write)], "copy"))
    engine.apply(HostAccess(0, where, write, "host", "host"))
    (race,) = engine.races
    assert race.rule.kind == "host-race"
    assert race.second.actor == HOST
    assert engine.is_fixed(race, propose(engine, race).repair.log) is True
    engine.apply(StreamSynchronize(main))
    engine.apply(HostAccess(0, where, write, "host", "later"))
    assert len(engine.races) == 1


def test_an_interval_made_in_a_hurry_is_the_same() -> None:
    assert whole(3, 9) == Footprint(3, 9)
    assert repr(whole(3, 9)) == repr(Footprint(3, 9))
