"""gpuprobe's order of a program's operators is that of the calls that torch makes.

A sample of ``benchmarks/stream_order.py``, which compares all programs of the hazard corpora.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import stream_order
from native_commands import python
from stream_order import CallOrder, Item, differences, relation

from gpuprobe.native.process import LogKind, NativeCall

ROOT = Path(__file__).resolve().parents[2]
NAMES = [
    "allreduce_async_waited",
    "blocking_streams_ordered_by_the_default_one (correct)",
    "data_parallel",
    "forward_here_backward_there",
    "gloo_cuda_unwaited",
    "graph_pinned_input_refilled",
    "host_reads_what_a_blocking_stream_copies (mended)",
    "legacy_default_stream_and_a_blocking_one_by_turns (correct)",
    "registered_host_memory_read_too_early",
    "two_devices_event",
]

# -- the order of calls


def call(kind: str, stream: int = 0, a: int = 0, b: int = 0, **given: Any) -> NativeCall:
    values = {"device": 0, "bytes": 64, "name": "", "thread": 1, "time_ns": 0, **given}
    sizes = {"grid": (1, 1, 1), "block": (1, 1, 1), "shared": 0}
    return NativeCall(kind=LogKind[kind], stream=stream, a=a, b=b, **values, **sizes)


def order(*calls: NativeCall | str) -> list[int]:
    """The relation of the launches among ``calls``, and of the host's accesses ("host")."""
    found, items = CallOrder(), []
    for one in calls:
        item = Item(0)
        if one == "host":
            found.host(item)
        else:
            assert isinstance(one, NativeCall)
            found.call(one, item)
        if item.ends:
            items.append(item.data())
    return relation(items)


def test_an_event_orders_what_was_queued_before_its_record() -> None:
    record, wait = call("EVENT_RECORD", 2, a=7), call("EVENT_WAIT", 3, a=7)
    one, other = call("LAUNCH", 2), call("LAUNCH", 3)
    assert order(one, record, wait, other) == [0, 1]
    assert order(record, one, wait, other) == [0, 0]
    assert order(one, record, other, wait) == [0, 0]


@pytest.mark.parametrize(("flags", "ordered"), [(0, True), (1, False)])
def test_the_default_stream_and_blocking_streams_wait_for_each_other(
    flags: int, ordered: bool
) -> None:
    created = [call("STREAM_CREATE", 2, a=flags), call("STREAM_CREATE", 3, a=flags)]
    on_default, one, other = call("LAUNCH", 0), call("LAUNCH", 2), call("LAUNCH", 3)
    assert order(*created, on_default, one) == [0, int(ordered)]
    assert order(*created, one, on_default) == [0, int(ordered)]
    assert order(*created, one, other) == [0, 0]
    assert order(*created, one, on_default, other) == [0, int(ordered), 0b11 * ordered]
    assert order(*created, one, call("LAUNCH", 0, device=1)) == [0, 0]


@pytest.mark.parametrize(
    "waits",
    [call("STREAM_SYNC", 2), call("DEVICE_SYNC"), call("FREE", a=4096), call("STREAM_QUERY", 2)],
    ids=lambda one: str(one.kind.name),
)
def test_the_host_waits(waits: NativeCall) -> None:
    assert order(call("LAUNCH", 2), "host", waits, "host") == [0, 0, 0b11]
    assert order(call("LAUNCH", 2), waits, call("LAUNCH", 3)) == [0, 1]


def test_a_query_of_an_allocator_orders_nothing() -> None:
    found, items = CallOrder(), [Item(0), Item(0)]
    found.call(call("LAUNCH", 2), items[0])
    found.call(call("STREAM_QUERY", 2), queried=False)
    found.host(items[1])
    assert relation([item.data() for item in items]) == [0, 0]


def test_what_another_thread_waits_for_the_program_does_not() -> None:
    found, items = CallOrder(), [Item(0), Item(0), Item(0)]
    found.call(call("LAUNCH", 2), items[0])
    found.call(call("STREAM_SYNC", 2, thread=9), ours=False)
    found.call(call("LAUNCH", 4, thread=9), ours=False)
    found.call(call("EVENT_RECORD", 4, a=7, thread=9), ours=False)
    found.call(call("EVENT_WAIT", 3, a=7, thread=9), ours=False)
    found.call(call("LAUNCH", 3), items[1])
    found.call(call("EVENT_WAIT", 3, a=7))
    found.call(call("LAUNCH", 3), items[2])
    assert relation([item.data() for item in items]) == [0, 0, 0b11]


@pytest.mark.parametrize(("pinned", "ordered"), [(True, 0), (False, 1)])
def test_a_copy_to_pageable_memory_is_waited_for(pinned: bool, ordered: int) -> None:
    memory = [call("MALLOC", a=4096)]
    if pinned:
        memory.append(call("HOST_ALLOC", a=1 << 20))
    copy = call("MEMCPY", 2, a=1 << 20, b=4096, name="async")
    assert order(*memory, copy, "host") == [0, ordered]


def test_what_a_graph_captures_is_ordered_within_it() -> None:
    before, after = call("LAUNCH", 0), call("GRAPH_LAUNCH", 0)
    capture = [call("CAPTURE_BEGIN", 2), call("LAUNCH", 2), call("EVENT_RECORD", 2, a=7)]
    joined = [call("EVENT_WAIT", 3, a=7), call("LAUNCH", 3), call("CAPTURE_END", 2)]
    assert order(before, *capture, *joined, after) == [0, 0, 0b10, 0b1]


# -- that of programs

PROGRAM = """\
import dataclasses, json, sys

sys.path.insert(0, {benchmarks!r})
import stream_order
from hazard_programs import Program, begin, gpus

text = '''
x = torch.ones(64, device="cuda")
s.wait_stream(cuda.current_stream())
with cuda.stream(s):
    y = x * 2
cuda.current_stream().wait_stream(s)
z = y + 1
'''
begin()
with gpus():
    from gpuprobe.hazards.engine import Engine
    from gpuprobe.hazards.events import EventWait
    from gpuprobe.native.process import LogKind

    program = Program("own", "program", text)
    run = stream_order.watched(program)
    found = [stream_order.orders(run)]
    for at, call in enumerate(run.calls):
        if call.kind is LogKind.EVENT_WAIT:
            calls = list(run.calls)
            calls[at] = dataclasses.replace(call, kind=LogKind.UNANSWERED)
            found.append(stream_order.orders(run._replace(calls=calls)))
    apply = Engine.apply
    Engine.apply = lambda engine, event: isinstance(event, EventWait) or apply(engine, event)
    found.append(stream_order.account(program))
print(json.dumps(found))
"""


def output(*command: str, folder: Path) -> str:
    done = python(*command, cwd=folder)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_a_missing_wait_is_a_difference(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(
        PROGRAM.format(benchmarks=str(ROOT / "benchmarks")), encoding="utf-8"
    )
    lines = output("program.py", folder=tmp_path).splitlines()
    whole, first, second, ours = json.loads(lines[-1])
    operators = [["ones", 2], ["mul", 5], ["add", 7]]
    assert whole["operators"] == operators
    assert list(differences(whole["log"], whole["ours"])) == []
    assert list(differences(first["log"], first["ours"])) == [(0, 1, True)]
    assert list(differences(second["log"], second["ours"])) == [(1, 2, True)]
    assert list(differences(ours["log"], ours["ours"])) == [(0, 1, False), (1, 2, False)]


@pytest.mark.slow
def test_the_order_is_that_of_torchs_calls(tmp_path: Path) -> None:
    script = str(ROOT / "benchmarks" / "stream_order.py")
    output(script, "collect", "found.jsonl", *NAMES, folder=tmp_path)
    found = stream_order.read(tmp_path / "found.jsonl")
    assert set(found) == set(NAMES)
    for name, orders in found.items():
        assert "error" not in orders, name
        assert len(orders["operators"]) > 1, name
        assert list(differences(orders["log"], orders["ours"])) == [], name
