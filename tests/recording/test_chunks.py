"""Trace chunks: round trip, and what is made of damaged and hostile ones."""

from __future__ import annotations

import json
import struct
import tracemalloc
import zlib
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from model_strategies import UNDECODABLE, memory_traces, same_trace, values_of

from examples import examples
from gpuprobe.analysis.trace.ledger import ledger_of
from gpuprobe.errors import DataError, UnsupportedSchema
from gpuprobe.model.io.budget import LIMITS
from gpuprobe.model.io.codec import to_plain
from gpuprobe.model.memory import Category, Segment, TraceAction
from gpuprobe.model.trace import Frame, MemoryTrace
from gpuprobe.recording import chunks

PREFIX = struct.Struct("<8sHHII")


def small_trace() -> MemoryTrace:
    trace = MemoryTrace("cpu", step=2)
    stack = trace.stacks.stack((trace.stacks.frame(Frame("train.py", 7, "main")),))
    for i in range(20):
        trace.events.append(
            i % 2, 4096 + i, 64 * i, time_us=10**15 + i, stack=stack, category=i % 5
        )
    trace.baseline.append(0, 1, 512, category=1)
    return trace


def rebuilt(data: bytes, change: Any) -> bytes:
    """The chunk with its header changed, and the checksum put right again."""
    magic, major, minor, length, _ = PREFIX.unpack_from(data)
    header = json.loads(data[PREFIX.size : PREFIX.size + length])
    change(header)
    raw = json.dumps(header).encode()
    body = data[PREFIX.size + length :]
    return PREFIX.pack(magic, major, minor, len(raw), zlib.crc32(raw)) + raw + body


@settings(max_examples=examples(60), deadline=None, suppress_health_check=list(HealthCheck))
@given(trace=memory_traces())
def test_round_trip(trace: MemoryTrace) -> None:
    back = chunks.decode_chunk(chunks.encode_chunk(trace), "chunk")
    assert same_trace(back, trace)
    # The tables still intern.
    for index, text in enumerate(back.stacks.strings):
        assert back.stacks.string(text) == index


@settings(max_examples=examples(60), deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(values_of(Segment), max_size=3))
def test_the_text_of_a_layout_is_that_of_its_values(segments: list[Segment]) -> None:
    text = f"[{chunks._layout(segments)}]"
    assert text == json.dumps(to_plain(segments), separators=(",", ":"))


def test_an_empty_trace() -> None:
    trace = MemoryTrace("cuda:1", complete=False)
    assert same_trace(chunks.decode_chunk(chunks.encode_chunk(trace), "chunk"), trace)


def test_a_step_that_did_nothing_but_fail_keeps_its_rows() -> None:
    """Failures have no address, so that column is zero in every row, and left out of the file."""
    trace = MemoryTrace("cuda:0")
    trace.baseline.append(0, 1 << 20, 512)
    for _ in range(2):
        trace.events.append(TraceAction.OOM.code, 0, 6 << 30, device_free=1 << 20)
    back = chunks.decode_chunk(chunks.encode_chunk(trace), "chunk")
    assert list(back.events.address) == [0, 0]
    ledger = ledger_of(back)
    assert (ledger.events, ledger.made, len(ledger)) == (2, 0, 1)


def test_file_names_that_are_not_utf8() -> None:
    trace = MemoryTrace("cpu")
    trace.stacks.frame(Frame(UNDECODABLE, 1, "f"))
    back = chunks.decode_chunk(chunks.encode_chunk(trace), "chunk")
    assert back.stacks.frames[1].filename == UNDECODABLE


def test_columns_of_zeros_take_no_space() -> None:
    trace = MemoryTrace("cpu")
    for i in range(1000):
        trace.baseline.append(0, i, 8)
    header = header_of(chunks.encode_chunk(trace))
    assert [column["name"] for column in header["columns"]] == ["address", "size"]


def header_of(data: bytes) -> dict[str, Any]:
    length = PREFIX.unpack_from(data)[3]
    found: dict[str, Any] = json.loads(data[PREFIX.size : PREFIX.size + length])
    return found


def test_cut_off_anywhere_is_a_data_error() -> None:
    data = chunks.encode_chunk(small_trace())
    for length in range(len(data)):
        with pytest.raises(DataError, match="my-chunk"):
            chunks.decode_chunk(data[:length], "my-chunk")


def test_bytes_after_the_end_are_a_data_error() -> None:
    data = chunks.encode_chunk(small_trace())
    for more in (b"\0", b"x" * 100, data):
        with pytest.raises(DataError, match="bytes after its end"):
            chunks.decode_chunk(data + more, "chunk")


def test_any_flipped_byte_is_a_data_error() -> None:
    data = chunks.encode_chunk(small_trace())
    missed = []
    for position in range(len(data)):
        damaged = bytearray(data)
        damaged[position] ^= 0x10
        try:
            chunks.decode_chunk(bytes(damaged), "chunk")
        except DataError:
            continue
        missed.append(position)
    # The minor version may be any: a newer minor is read.
    assert set(missed) <= {10, 11}


@settings(max_examples=examples(150), deadline=None)
@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_a_data_error(data: bytes) -> None:
    with pytest.raises(DataError):
        chunks.decode_chunk(data, "chunk")
    good = chunks.encode_chunk(MemoryTrace("cpu"))
    with pytest.raises(DataError):
        chunks.decode_chunk(good[: PREFIX.size] + data, "chunk")


def test_a_newer_major_version_is_refused() -> None:
    data = bytearray(chunks.encode_chunk(small_trace()))
    struct.pack_into("<H", data, 8, chunks.CHUNK_VERSION[0] + 1)
    with pytest.raises(UnsupportedSchema, match="newer"):
        chunks.decode_chunk(bytes(data), "chunk")


def test_a_newer_minor_version_may_add_columns() -> None:
    trace = small_trace()
    data = chunks.encode_chunk(trace)
    extra = zlib.compress(b"\x01" * 20)
    tables = header_of(data)["tables"]["stored"]

    def add(header: dict[str, Any]) -> None:
        entry = {"table": "events", "name": "mood", "typecode": "B", "rows": 20}
        entry |= {"stored": len(extra), "crc32": zlib.crc32(extra)}
        header["columns"].append(entry)

    changed = rebuilt(data, add)
    changed = changed[:-tables] + extra + changed[-tables:]
    assert same_trace(chunks.decode_chunk(changed, "chunk"), trace)


def test_a_category_added_by_a_newer_minor_version_is_unknown() -> None:
    trace = small_trace()
    trace.events.category[3] = len(Category)
    back = chunks.decode_chunk(chunks.encode_chunk(trace), "chunk")
    assert back.events.category[3] == Category.UNKNOWN.code
    assert back.events.category[4] == trace.events.category[4]


@pytest.mark.parametrize("name", ["stack", "module", "phase", "pool", "action"])
def test_an_index_outside_its_table_is_a_data_error(name: str) -> None:
    trace = small_trace()
    getattr(trace.events, name)[0] = 200
    with pytest.raises(DataError, match=f"column {name}"):
        chunks.decode_chunk(chunks.encode_chunk(trace), "chunk")


def lengthen_column(header: dict[str, Any]) -> None:
    header["columns"][0]["rows"] = header["rows"]["events"] = 10**10


def lengthen_rows(header: dict[str, Any]) -> None:
    header["columns"] = []
    header["rows"]["baseline"] = 10**10


def lengthen_tables(header: dict[str, Any]) -> None:
    header["tables"]["length"] = 10**12


@pytest.mark.parametrize(
    "change",
    [
        lengthen_column,
        lengthen_rows,
        lengthen_tables,
        lambda header: header["columns"][0].update(stored=10**12),
        lambda header: header["columns"][0].update(stored=-1),
        lambda header: header["columns"][0].update(rows=-1),
        lambda header: header["columns"][0].update(typecode="u"),
        lambda header: header["columns"][0].update(typecode="Q", rows=1),
        lambda header: header.pop("tables"),
        lambda header: header.update(device=5),
        lambda header: header.update(step="1"),
        lambda header: header.update(pools=[[0]]),
        lambda header: header.update(pools=[]),
        lambda header: header.update(settings={"expandable_segments": "yes"}),
        lambda header: header.update(columns=None),
    ],
)
def test_a_lying_header_is_refused_before_memory_is_spent(change: Any) -> None:
    data = rebuilt(chunks.encode_chunk(small_trace()), change)
    tracemalloc.start()
    try:
        with pytest.raises(DataError, match="damaged"):
            chunks.decode_chunk(data, "chunk")
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


def test_a_bomb_stays_within_its_declared_length() -> None:
    # 16 MiB of zeros behind a declared length of 20 bytes.
    trace = small_trace()
    data = chunks.encode_chunk(trace)
    first = header_of(data)["columns"][0]
    bomb = zlib.compress(bytes(16 << 20), 9)
    claim = {"stored": len(bomb), "crc32": zlib.crc32(bomb)}
    changed = rebuilt(data, lambda header: header["columns"][0].update(claim))
    length = PREFIX.unpack_from(changed)[3] + PREFIX.size
    changed = changed[:length] + bomb + changed[length + first["stored"] :]
    tracemalloc.start()
    try:
        with pytest.raises(DataError, match="differs from the header"):
            chunks.decode_chunk(changed, "chunk")
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


def with_columns(data: bytes, entries: list[tuple[dict[str, Any], bytes]]) -> bytes:
    """The chunk with more columns before its tables."""
    tables = header_of(data)["tables"]["stored"]
    listed = [{"stored": len(blob), "crc32": zlib.crc32(blob), **entry} for entry, blob in entries]
    changed = rebuilt(data, lambda header: header["columns"].extend(listed))
    blobs = b"".join(blob for _, blob in entries)
    return changed[:-tables] + blobs + changed[-tables:]


def test_columns_that_are_not_known_are_not_unpacked() -> None:
    """Forty of 100 MB would take seconds; and what is behind the name is nobody's business."""
    entry = {"table": "events", "name": "later", "typecode": "Q", "rows": 1 << 40}
    trace = small_trace()
    data = with_columns(chunks.encode_chunk(trace), [(entry, b"no zlib stream")])
    assert same_trace(chunks.decode_chunk(data, "chunk"), trace)


def test_a_column_twice_is_a_data_error() -> None:
    entry = {"table": "events", "name": "size", "typecode": "Q", "rows": 20}
    data = with_columns(chunks.encode_chunk(small_trace()), [(entry, zlib.compress(bytes(160)))])
    with pytest.raises(DataError, match="column size twice"):
        chunks.decode_chunk(data, "chunk")


def test_more_events_than_a_file_of_its_size_holds_are_refused_before_they_are_read() -> None:
    def lengthen(header: dict[str, Any]) -> None:
        header["rows"]["events"] = LIMITS["events"].free + 10_000

    data = rebuilt(chunks.encode_chunk(small_trace()), lengthen)
    with pytest.raises(DataError, match="more events than a file of its size holds"):
        chunks.decode_chunk(data, "chunk")
