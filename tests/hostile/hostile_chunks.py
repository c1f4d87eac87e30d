"""The trace chunks of `hostile_recordings`: what one file of a recording can be made to do."""

# ruff: noqa: E501

from __future__ import annotations

import json
import os
import zlib
from array import array
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from hostile_mutations import PREFIX, packed_chunk, unpacked_chunk
from hostile_seed import CHUNK, SOURCE, lazy, plain, with_steps

# -- trace chunks


def chunk(change: Callable[[Any, Any, Any], None], folder: Path, *, lie: bool = False) -> None:
    header, columns, tables = unpacked_chunk(SOURCE[CHUNK])
    change(header, columns, tables)
    plain(folder)
    (folder / CHUNK).write_bytes(packed_chunk(header, columns, tables, lie=lie))


def _rows(count: int, header: Any, columns: Any, tables: Any) -> None:
    """So many events, in a file of a few hundred kilobytes."""
    header["rows"] = {"events": count, "baseline": 0}
    for key in list(columns):
        if key[0] == "baseline":
            del columns[key]
    for name, typecode, value in (
        ("action", "B", 0), ("address", "Q", 4096), ("size", "Q", 512), ("time_us", "q", 5),
    ):  # fmt: skip
        columns["events", name] = array(typecode, [value]) * count
    for name in ("stream", "stack", "category", "module", "phase", "pool"):
        columns.pop(("events", name), None)


def _column_bomb(name: str, header: Any, columns: Any, tables: Any) -> None:
    """One column that unpacks to 400 MB, of rows that the others do not have."""
    typecode = columns.get(("events", name), array("Q")).typecode
    count = 400_000_000 // array(typecode).itemsize
    columns["events", name] = array(typecode, bytes(count * array(typecode).itemsize))


def _unknown_bombs(header: Any, columns: Any, tables: Any) -> None:
    for n in range(40):
        columns["events", f"later{n}"] = array("Q", bytes(100_000_000))


def _tables(key: str, value: Any, header: Any, columns: Any, tables: Any) -> None:
    tables[key] = value


def table_of(key: str, value: Any) -> Callable[[Any, Any, Any], None]:
    """The change that puts rows in place of one of a chunk's tables."""
    return partial(_tables, key, value)


def _all(column: str, value: int, header: Any, columns: Any, tables: Any) -> None:
    values = columns["events", column]
    columns["events", column] = array(values.typecode, [value]) * len(values)


def _head(key: str, value: Any, header: Any, columns: Any, tables: Any) -> None:
    header[key] = value


def _deep_stacks(depth: int, count: int, header: Any, columns: Any, tables: Any) -> None:
    tables["stacks"] = [[]] + [[n % len(tables["frames"])] * depth for n in range(count)]
    values = columns["events", "stack"]
    columns["events", "stack"] = array("I", [n % (count + 1) for n in range(len(values))])


def _distinct_deep_stack(depth: int, header: Any, columns: Any, tables: Any) -> None:
    tables["frames"] = [["", 0, ""]] + [[f"/p/f{n}.py", n, f"f{n}"] for n in range(depth)]
    tables["stacks"] = [[], list(range(1, depth + 1))]
    columns["events", "stack"] = array("I", [1] * len(columns["events", "stack"]))


def _deep_module(header: Any, columns: Any, tables: Any) -> None:
    tables["strings"] = ["", ".".join("m" * 20_000)]
    columns["events", "module"] = array("I", [1] * len(columns["events", "module"]))


def _deep_phase(header: Any, columns: Any, tables: Any) -> None:
    tables["strings"] = ["", "/".join("p" * 20_000)]
    columns["events", "phase"] = array("I", [1] * len(columns["events", "action"]))
    columns["events", "module"] = array("I", [0] * len(columns["events", "action"]))


def _segments(count: int, blocks: int, header: Any, columns: Any, tables: Any) -> None:
    tables["segments"] = [
        {"device": 0, "address": n << 30, "total_size": 1 << 21, "stream": 0,
         "segment_type": "large",
         "blocks": [{"address": (n << 30) + b, "size": 1, "requested_size": 1,
                     "state": "active_allocated"} for b in range(blocks)]}
        for n in range(count)
    ]  # fmt: skip


def _segment(header: Any, columns: Any, tables: Any, **change: Any) -> None:
    _segments(2, 2, header, columns, tables)
    tables["segments"][0].update(change)


def _block(header: Any, columns: Any, tables: Any, **change: Any) -> None:
    _segments(2, 2, header, columns, tables)
    tables["segments"][0]["blocks"][1].update(change)


def _ooms(count: int, header: Any, columns: Any, tables: Any) -> None:
    _rows(count, header, columns, tables)
    columns["events", "action"] = array("B", [8]) * count
    columns["events", "size"] = array("Q", range(1, count + 1))


def _growing(count: int, header: Any, columns: Any, tables: Any) -> None:
    """Every block at an address of its own, none of them freed."""
    _rows(count, header, columns, tables)
    columns["events", "address"] = array("Q", range(512, 512 * count + 1, 512))


def _settings(header: Any, columns: Any, tables: Any, **values: Any) -> None:
    header["settings"] = values


_Part = Callable[[Any, Any, Any], None]
CHUNKS: dict[str, _Part] = {
    **{f"a column {name} of 400 MB": partial(_column_bomb, name)
       for name in ("action", "address", "time_us", "stack", "phase", "device_free")},
    "forty unknown columns of 100 MB": _unknown_bombs,
    "500,000 rows": lazy(lambda: partial(_rows, 500_000)),
    "2 million rows": lazy(lambda: partial(_rows, 2_000_000)),
    "30 million rows": lazy(lambda: partial(_rows, 30_000_000)),
    "300,000 blocks that are never freed": lazy(lambda: partial(_growing, 300_000)),
    "20,000 times out of memory": lazy(lambda: partial(_ooms, 20_000)),
    "sizes of 2**63": lazy(lambda: partial(_all, "size", 1 << 63)),
    "sizes of 2**64 - 1": lazy(lambda: partial(_all, "size", (1 << 64) - 1)),
    "addresses of 2**64 - 1": lazy(lambda: partial(_all, "address", (1 << 64) - 1)),
    "times of -2**63": lazy(lambda: partial(_all, "time_us", -(1 << 63))),
    "times of 2**63 - 1": lazy(lambda: partial(_all, "time_us", (1 << 63) - 1)),
    "streams of 2**64 - 1": lazy(lambda: partial(_all, "stream", (1 << 64) - 1)),
    "actions that are none": lazy(lambda: partial(_all, "action", 200)),
    "stacks that are none": lazy(lambda: partial(_all, "stack", (1 << 32) - 1)),
    "a stack 3,000 deep": lazy(lambda: partial(_distinct_deep_stack, 3_000)),
    "a stack 200,000 deep": lazy(lambda: partial(_distinct_deep_stack, 200_000)),
    "20 stacks 100,000 deep": lazy(lambda: partial(_deep_stacks, 100_000, 20)),
    "3,000 stacks 2,000 deep": lazy(lambda: partial(_deep_stacks, 2_000, 3_000)),
    "a module 20,000 deep": _deep_module,
    "a phase 20,000 deep": _deep_phase,
    "a string of 50 MB": lazy(lambda: partial(_tables, "strings", ["", "x" * 50_000_000])),
    "a million strings": lazy(lambda: partial(_tables, "strings", [""] + [f"s{n}" for n in range(1_000_000)])),
    "a million frames": lazy(lambda: partial(
        _tables, "frames", [["", 0, ""]] + [["f.py", n, "f"] for n in range(1_000_000)]
    )),
    "13 million frames": lazy(lambda: partial(_tables, "frames", [["", 0, ""]] * 13_000_000)),
    "15 million stacks": lazy(lambda: partial(_tables, "stacks", [[]] * 15_000_000)),
    "40 million strings": lazy(lambda: partial(_tables, "strings", [""] * 40_000_000)),
    "frames with negative lines": lazy(lambda: partial(
        _tables, "frames", [["", 0, ""]] + [["f.py", -n, "f"] for n in range(1, 60)]
    )),
    "frames with lines of 2**64": lazy(lambda: partial(
        _tables, "frames", [["", 0, ""]] + [["f.py", (1 << 64) - n, "f"] for n in range(1, 60)]
    )),
    "a stack of text": lazy(lambda: partial(_tables, "stacks", [[], ["x"]])),
    "no stacks": lazy(lambda: partial(_tables, "stacks", [])),
    "strings that are numbers": lazy(lambda: partial(_tables, "strings", ["", 5])),
    "100,000 segments": lazy(lambda: partial(_segments, 100_000, 1)),
    "a segment of 200,000 blocks": lazy(lambda: partial(_segments, 1, 200_000)),
    "a segment of 2**64 - 1": lazy(lambda: partial(_segment, total_size=(1 << 64) - 1)),
    "a segment at -1": lazy(lambda: partial(_segment, address=-1)),
    "a segment of a device 2**40": lazy(lambda: partial(_segment, device=1 << 40)),
    "a segment whose type is an escape": lazy(lambda: partial(_segment, segment_type="\x1b]0;x\x07")),
    "a block of 2**62": lazy(lambda: partial(_block, size=1 << 62)),
    "a block of -5": lazy(lambda: partial(_block, size=-5)),
    "a block with a stack that is none": lazy(lambda: partial(_block, stack=1 << 30)),
    "a block with a negative stack": lazy(lambda: partial(_block, stack=-1)),
    "100,000 annotations": lazy(lambda: partial(
        _tables, "annotations",
        [["START" if n % 2 else "END", "Optimizer.step#A.step", n] for n in range(100_000)],
    )),
    "annotations at 2**63": lazy(lambda: partial(
        _tables, "annotations", [["START", "Optimizer.step#A.step", (1 << 63) - 1]] * 5
    )),
    "100,000 pools": lazy(lambda: partial(_head, "pools", [[n, n] for n in range(100_000)])),
    "no pools": lazy(lambda: partial(_head, "pools", [])),
    "pools of 2**64": lazy(lambda: partial(_head, "pools", [[1 << 64, 0]])),
    "a device 2**40": lazy(lambda: partial(_head, "device", f"cuda:{1 << 40}")),
    "a device of 1 MB": lazy(lambda: partial(_head, "device", "cuda:" + "9" * 1_000_000)),
    "a device that is an escape": lazy(lambda: partial(_head, "device", "cuda:0\x1b[2J")),
    "a step -1": lazy(lambda: partial(_head, "step", -1)),
    "a step 2**63": lazy(lambda: partial(_head, "step", (1 << 63) - 1)),
    "settings of nothing": lazy(lambda: partial(_settings, garbage_collection_threshold={"float": "nan"})),
    "settings of too much": lazy(lambda: partial(
        _settings, max_split_size=1 << 62, max_non_split_rounding=-(1 << 62),
        roundup_power2_divisions={str(n): n for n in range(-5, 50_000)}, large_segment_size=0,
    )),
}  # fmt: skip

LIES: dict[str, _Part] = {
    "rows of 2**62": lambda header, columns, tables: header["rows"].update(events=1 << 62),
    "columns longer than they are": lambda header, columns, tables: [
        entry.update(rows=1 << 40) for entry in header["columns"]
    ] and None,
    "typecodes that are none": lambda header, columns, tables: [
        entry.update(typecode="P") for entry in header["columns"]
    ] and None,
}  # fmt: skip


def chunk_bytes(change: Callable[[bytes], bytes], folder: Path) -> None:
    plain(folder)
    (folder / CHUNK).write_bytes(change(SOURCE[CHUNK]))


BYTES: dict[str, Callable[[bytes], bytes]] = {
    "cut off in its header": lambda data: data[:30],
    "cut off at its end": lambda data: data[:-3],
    "with bytes after its end": lambda data: data + b"x" * 1000,
    "a header of 4 GB": lambda data: data[:12] + b"\xff\xff\xff\xff" + data[16:],
    "a newer version": lambda data: data[:8] + b"\x09\x00" + data[10:],
    "all zeros": lambda data: bytes(5_000_000),
    "a tables blob of 1 GB": lambda data: _space_bomb(data),
}  # fmt: skip


def _space_bomb(data: bytes) -> bytes:
    """Tables of a gigabyte of spaces, in a file of a megabyte."""
    header, columns, tables = unpacked_chunk(data)
    packer = zlib.compressobj(9)
    raw = json.dumps(tables).encode()
    parts = [packer.compress(raw)]
    for _ in range(1000):
        parts.append(packer.compress(b" " * 1_000_000))
    blob = b"".join([*parts, packer.flush()])
    made = packed_chunk(header, columns, tables)
    *_, length, _ = PREFIX.unpack_from(made)
    head = json.loads(made[20 : 20 + length])
    body = made[20 + length : len(made) - head["tables"]["stored"]]
    length_of = len(raw) + 1_000_000_000
    head["tables"] = {"length": length_of, "stored": len(blob), "crc32": zlib.crc32(blob)}
    new = json.dumps(head).encode()
    return PREFIX.pack(b"\x89GPTRC\r\n", 1, 0, len(new), zlib.crc32(new)) + new + body + blob


def many_chunks(count: int, rows: int, folder: Path) -> None:
    """So many small files that each unpack to so many rows."""
    header, columns, tables = unpacked_chunk(SOURCE[CHUNK])
    _rows(rows, header, columns, tables)
    data = packed_chunk(header, columns, tables)
    names = [f"rank-00000.trace-{n:06d}.cols" for n in range(count)]
    with_steps(
        [
            {"index": 10 + n, "start_ns": n, "duration_ns": 1, "traces": [name]}
            for n, name in enumerate(names)
        ],
        folder,
    )
    first = folder / "rank-00000.trace-000000.cols"
    first.write_bytes(data)
    for name in names[1:]:
        (folder / name).unlink(missing_ok=True)
        os.link(first, folder / name)
