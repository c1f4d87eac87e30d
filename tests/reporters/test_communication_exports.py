"""The communication of a step in other formats, read by protobuf's own library and as JSON."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import report_builders as build
from hypothesis import given
from hypothesis import strategies as st

from gpuprobe.api.views import write_chakra, write_perfetto
from gpuprobe.errors import DataError
from gpuprobe.model.place import Place
from gpuprobe.model.run.communication import (
    MOST_OPERATIONS,
    CollectiveRecord,
    exchanges_of,
    group_ranks,
    group_text,
    records_of,
    wire_bytes,
)
from gpuprobe.model.run.recording import Recording
from gpuprobe.model.values import Bytes, Unavailable
from gpuprobe.recording.reader import read_recording
from gpuprobe.recording.writer import RecordingWriter
from gpuprobe.reporters.sections.report import report_sections
from gpuprobe.reporters.text import draw

MS = 1_000_000


def record(
    op: str = "all_reduce",
    payload: int = 1024,
    arrival: int = 5,
    took: int | None = 2,
    members: str = "0-1",
    **more: Any,
) -> CollectiveRecord:
    """Times are milliseconds; ``took`` None: the call does not wait."""
    ranks = len(group_ranks(members, 64))
    unknown = Unavailable("the call does not wait for it")
    found = CollectiveRecord(
        group=members,
        axis="dp",
        ranks=ranks,
        sequence=1,
        op=op,
        dtype="float32",
        payload=Bytes(payload),
        wire=wire_bytes(op, payload, ranks),
        place=Place("train.py", 12),
        module="Block",
        arrival_ns=arrival * MS,
        completion_ns=unknown if took is None else (arrival + took) * MS,
        members=members,
        peer=Unavailable("unknown"),
    )
    return replace(found, **more)


def recorded(*ranks: list[CollectiveRecord]) -> Recording:
    found = []
    for number, records in enumerate(ranks):
        steps = [
            replace(build.step(i, {"backward": 1 << 20}), exchanges=exchanges_of(operations))
            for i, operations in enumerate(([], records))
        ]
        session = build.session(rank=number, world_size=len(ranks))
        found.append(build.rank_recording(steps, (), session=session))
    return Recording("r.gpuprobe", (2, 3), tuple(found))


# -- Chakra, by the numbers of its published schema (schema/protobuf/et_def.proto)

_ATTRIBUTE = {"name": (1, "string"), "int32_val": (7, "int32"), "int64_val": (9, "int64")}
_ATTRIBUTE |= {"bool_val": (27, "bool"), "string_val": (29, "string")}
_NODE = {"id": (1, "uint64"), "name": (2, "string"), "type": (3, "int32")}
_NODE |= {"start_time_micros": (6, "uint64"), "duration_micros": (7, "uint64")}


def schema() -> Any:
    """Its messages as classes of protobuf's own library."""
    pytest.importorskip("google.protobuf")
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    file = descriptor_pb2.FileDescriptorProto(name="et.proto", package="C", syntax="proto3")
    kinds = descriptor_pb2.FieldDescriptorProto

    def message(name: str, fields: dict[str, tuple[int, str]], oneof: bool = False) -> Any:
        made = file.message_type.add(name=name)
        if oneof:
            made.oneof_decl.add(name="value")
        for field, (number, kind) in fields.items():
            added = made.field.add(name=field, number=number, label=kinds.LABEL_OPTIONAL)
            added.type = getattr(kinds, f"TYPE_{kind.upper()}")
            if oneof and field != "name":
                added.oneof_index = 0
        return made

    message("Metadata", {"version": (1, "string")})
    message("Attribute", _ATTRIBUTE, oneof=True)
    node = message("Node", _NODE)
    node.field.add(name="data_deps", number=5, label=kinds.LABEL_REPEATED, type=kinds.TYPE_UINT64)
    node.field.add(
        name="attr",
        number=10,
        label=kinds.LABEL_REPEATED,
        type=kinds.TYPE_MESSAGE,
        type_name=".C.Attribute",
    )
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return lambda name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"C.{name}"))


def nodes(path: Path) -> list[dict[str, Any]]:
    """Every node of a trace, with its attributes by name."""
    made = schema()
    messages = []
    data = io.BytesIO(path.read_bytes())
    while first := data.read(1):
        size, shift = first[0] & 0x7F, 7
        while first[0] & 0x80:
            first = data.read(1)
            size |= (first[0] & 0x7F) << shift
            shift += 7
        messages.append(data.read(size))
    assert made("Metadata").FromString(messages[0]).version == "0.0.4"
    found = []
    for text in messages[1:]:
        node = made("Node").FromString(text)
        assert not node.ByteSize() - len(text)  # nothing in it that the schema does not have
        attributes = {one.name: getattr(one, one.WhichOneof("value")) for one in node.attr}
        plain = {name: getattr(node, name) for name in _NODE}
        found.append({**plain, **attributes, "name": node.name, "needs": list(node.data_deps)})
    return found


def test_chakra_has_each_operation_and_the_time_between(tmp_path: Path) -> None:
    records = [
        record(arrival=5, took=2),
        record("all_gather", 1024, arrival=8, took=None),
        record("reduce_scatter", 1024, arrival=9, took=1, members="0-4:2"),
    ]
    found = recorded(records, records)
    written = write_chakra(found, tmp_path / "job")
    assert [path.name for path in written] == ["job.groups.json", "job.0.et", "job.1.et"]
    assert json.loads(written[0].read_text()) == {"1": [0, 1], "2": [0, 2, 4]}
    listed = nodes(written[1])
    assert [(node["type"], node["name"]) for node in listed] == [
        (4, "compute"),
        (7, "all_reduce dp"),
        (4, "compute"),
        (7, "all_gather dp"),
        (4, "compute"),
        (7, "reduce_scatter dp"),
    ]
    assert [node["id"] for node in listed] == [1, 2, 3, 4, 5, 6]
    # What is not waited for blocks its group alone.
    assert [node["needs"] for node in listed] == [[], [1], [2], [2, 3], [3], [5]]
    reduced, gathered, scattered = listed[1::2]
    assert (reduced["comm_type"], gathered["comm_type"], scattered["comm_type"]) == (0, 2, 7)
    assert (reduced["comm_size"], gathered["comm_size"]) == (1024, 512)
    assert (reduced["pg_name"], scattered["pg_name"]) == ("1", "2")
    assert (reduced["start_time_micros"], reduced["duration_micros"]) == (5000, 2000)
    assert (listed[2]["start_time_micros"], listed[2]["duration_micros"]) == (7000, 1000)
    assert reduced["is_cpu_op"] is False
    assert reduced["place"] == "train.py:12"


def test_chakra_of_simulated_ranks_has_no_times(tmp_path: Path) -> None:
    found = recorded([record("send", arrival=3, peer=7), record("recv", arrival=4, peer=7)])
    rank = found.ranks[0]
    rank.session = replace(rank.session, virtual=True)
    sent, received = nodes(write_chakra(found, tmp_path / "job")[1])
    assert (sent["type"], sent["comm_src"], sent["comm_dst"]) == (5, 0, 7)
    assert (received["type"], received["comm_src"], received["comm_dst"]) == (6, 7, 0)
    assert sent["duration_micros"] == received["duration_micros"] == 0
    assert received["needs"] == [1]


def test_chakra_needs_operations(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no operations with other ranks") as error:
        write_chakra(recorded([], []), tmp_path / "job")
    assert "estimate --ranks" in str(error.value.hint)


# -- Perfetto


def test_perfetto_leads_from_the_last_to_the_others(tmp_path: Path) -> None:
    late = recorded([record(arrival=5, took=6)], [record(arrival=10, took=1)])
    write_perfetto(late, tmp_path / "t.json")
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    names = {e["args"]["name"]: e["pid"] for e in events if e["name"] == "process_name"}
    first, last = (names[f"rank {rank}: communication"] for rank in (0, 1))
    slices = {e["pid"]: e for e in events if e["ph"] == "X"}
    assert (slices[first]["ts"], slices[first]["dur"]) == (0, 6000)
    assert slices[last]["args"]["payload"] == 1024
    (start,) = {(e["pid"], e["ts"]) for e in events if e["ph"] == "s"}
    (end,) = {(e["pid"], e["ts"]) for e in events if e["ph"] == "f"}
    assert (start, end) == ((last, 5000), (first, 6000))


# -- what they are made of


def test_a_report_adds_them_up() -> None:
    from gpuprobe.reporters.summary import summarize

    found = summarize(recorded([record(), record("all_gather", 4096, arrival=9)], [record()]))
    assert found.communication is not None
    assert (found.communication.rank, found.communication.step) == (0, 1)
    assert sum(row.wire for row in found.communication.rows) == 1024 + 2048
    stream = io.StringIO()
    draw.write(report_sections(found), stream)
    assert "Communication of rank 0, step 1: 3.0 KiB sent by this rank" in stream.getvalue()
    assert "all_gather dp, 2 ranks, float32" in stream.getvalue()


RANKS = st.lists(st.integers(0, 4096), min_size=1, max_size=20, unique=True).map(sorted)


@given(RANKS)
def test_a_group_is_its_text(ranks: list[int]) -> None:
    assert group_ranks(group_text(ranks), 64) == tuple(ranks)


@given(st.integers(0, 9), st.integers(2, 9), st.integers(2, 9))
def test_a_dimension_of_a_mesh_is_short(first: int, stride: int, count: int) -> None:
    ranks = range(first, first + stride * count, stride)
    assert group_ranks(group_text(ranks), 64) == tuple(ranks)
    assert len(group_text(ranks)) <= 7


def test_a_damaged_group_is_short() -> None:
    assert group_ranks("0-99999999999", 8) == tuple(range(8))
    assert group_ranks("x", 8) == ()
    assert group_ranks("", 8) == ()


@given(st.permutations(range(6)))
def test_records_come_back_in_order(order: list[int]) -> None:
    ops = ("all_reduce", "all_gather")
    records = [
        record(ops[at % 2], arrival=10 + at, sequence=1 + at, took=at % 3 or None) for at in order
    ]
    back = records_of(exchanges_of(records))
    assert [one.arrival_ns for one in back] == [(10 + at) * MS for at in range(6)]
    assert {replace(one, completion_ns=0, peer=0) for one in back} == {
        replace(one, completion_ns=0, peer=0) for one in records
    }


def test_groups_that_no_job_has_are_refused(tmp_path: Path) -> None:
    """A few bytes of text could be a group of any size."""
    huge = [record(members=f"0-{n + 10**6}", ranks=10**9) for n in range(9)]
    with pytest.raises(DataError, match="groups of more than 4,194,304 ranks"):
        write_chakra(recorded(huge), tmp_path / "k")
    assert group_ranks("9" * 100_000, 10) == ()


def test_a_step_has_no_more_operations_than_are_recorded(tmp_path: Path) -> None:
    whole = replace(exchanges_of([record()])[0], sequence=(1,) * MOST_OPERATIONS)
    writer = RecordingWriter.create(tmp_path / "a.gpuprobe")
    writer.session(build.session(), build.environment())
    step = build.step(0, {"backward": 1 << 20})
    writer.step(replace(step, exchanges=(whole,)))
    writer.step(replace(step, index=1, exchanges=(whole, exchanges_of([record()])[0])))
    writer.close()
    (rank,) = read_recording(tmp_path / "a.gpuprobe").ranks
    assert [step.index for step in rank.steps] == [0]
    assert rank.blind_spots[-1].what.startswith("1 damaged line")
