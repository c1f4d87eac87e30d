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
    CollectiveRecord,
    exchanges_of,
    group_text,
    wire_bytes,
)
from gpuprobe.model.run.recording import Recording
from gpuprobe.model.values import Bytes, Unavailable
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
    ranks = len(ranks_of(members))
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


def ranks_of(text: str) -> list[int]:
    """The ranks of a `group_text`, as the documentation of the format reads it."""
    found: list[int] = []
    for part in text.split(","):
        numbers, _, step = part.partition(":")
        first, _, last = numbers.partition("-")
        found += range(int(first), int(last or first) + 1, int(step or 1))
    return found


@given(RANKS)
def test_a_group_is_its_text(ranks: list[int]) -> None:
    assert ranks_of(group_text(ranks)) == ranks


@given(st.integers(0, 9), st.integers(2, 9), st.integers(2, 9))
def test_a_dimension_of_a_mesh_is_short(first: int, stride: int, count: int) -> None:
    ranks = range(first, first + stride * count, stride)
    assert ranks_of(group_text(ranks)) == list(ranks)
    assert len(group_text(ranks)) <= 7
