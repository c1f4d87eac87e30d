"""The communication of a step: in Perfetto's format, in a report, and recorded."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import report_builders as build
from hypothesis import given
from hypothesis import strategies as st

from gpuprobe.api.views import write_perfetto
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
    from gpuprobe.recording.summary import summarize

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
