"""Files that gpuprobe reads, changed at random: the same change for the same number, always.

The seeds are the recordings, baselines, documents and logs in ``tests/recorded`` and the snapshots
of ``tests/support/snapshot_samples.py``. Half of a mutation is of bytes, half of structure: what
is JSON is decoded, changed at random places and encoded again, and the checksums of a chunk are
put right, so that what is behind them is reached.
"""

from __future__ import annotations

import copy
import json
import pickle
import random
import struct
import sys
import zlib
from array import array
from collections.abc import Callable, Iterator
from typing import Any

import hostile_documents as documents
from hostile_changes import RECORDED, VALUES, change_bytes, change_lines, change_parts, dumps
from snapshot_samples import modern, torch_2_0, without_frames

Files = dict[str, bytes]

PREFIX = struct.Struct("<8sHHII")

OPCODES = [
    b"cos\nsystem\n", b"\x8c\x02os\x8c\x06system\x93", b"R", b"\x85R", b"(ios\nsystem\n", b"b",
    b"o", b"\x81", b"\x92", b"\x82\x01", b"\x83\x01\x00", b"Q", b"Pid\n", b"\x97", b"\x98", b"0",
    b"1", b"2", b"(", b"t", b"l", b"d", b"e", b"u", b"s", b"a", b"]", b"}", b")", b"\x8f", b"\x90",
    b"\x91", b"\x85", b"\x86", b"\x87", b"\x94", b".", b"N", b"\x88", b"h\x00",
    b"j\xff\xff\x00\x00",
    b"q\x05", b"r\xff\xff\xff\x00", b"r\xff\xff\xff\xff", b"p99999999\n", b"I1\n", b"L1L\n",
    b"F1e400\n", b"Gnan_nan_", b"\x8b\xff\xff\xff\x7f", b"\x8a\x09" + b"\xff" * 9,
    b"\x8d" + struct.pack("<Q", 1 << 40), b"\x8e" + struct.pack("<Q", 1 << 33),
    b"\x96" + struct.pack("<Q", 1 << 33), b"\x95" + struct.pack("<Q", 1 << 50), b"\x80\x05",
]  # fmt: skip


# -- recordings


def recording_seeds() -> list[Files]:
    """Each with the header of version 1, and with that of version 2 and its newer keys."""
    found = []
    for folder in sorted(RECORDED.glob("*.gpuprobe")):
        old = {path.name: path.read_bytes() for path in sorted(folder.iterdir())}
        found += [old, {name: _renewed(data) for name, data in old.items()}]
    return found


def _renewed(data: bytes) -> bytes:
    first, newline, rest = data.partition(b"\n")
    if not first.startswith(b"{"):
        return data
    head = json.loads(first)
    ranks = {key: head[key] for key in ("rank", "world_size")}
    made = {"schema": head["schema"], "version": [2, 3], "gpuprobe": "0.1", **ranks}
    rest = rest.replace(b'{"type":"step"', b'{"type":"step","exchanges":' + dumps(_EXCHANGES), 1)
    return dumps(made) + newline + rest


_EXCHANGES = [
    {"group": "0", "ranks": 4, "op": op, "payload": 4096, "wire": 3072, "place": "train.py:9",
     "axis": "dp", "dtype": "float32", "module": "net.0", "members": members, "peer": 3,
     "sequence": [1, 2], "arrival_ns": [5, 90], "completion_ns": [60, 0]}
    for op, members in (("all_gather", "0-3"), ("send", "0-24:8"))
]  # fmt: skip


def unpacked_chunk(data: bytes) -> tuple[Any, dict[tuple[str, str], array[int]], Any]:
    """The header, columns and tables of a trace chunk."""
    *_, length, _ = PREFIX.unpack_from(data)
    header = json.loads(data[PREFIX.size : PREFIX.size + length])
    at = PREFIX.size + length
    columns = {}
    for entry in header["columns"]:
        raw = zlib.decompress(data[at : at + entry["stored"]])
        at += entry["stored"]
        columns[entry["table"], entry["name"]] = array(entry["typecode"], raw)
    return header, columns, json.loads(zlib.decompress(data[at:]))


def packed_chunk(
    header: Any, columns: dict[tuple[str, str], array[int]], tables: Any, *, lie: bool = False
) -> bytes:
    """A chunk of these parts, with right checksums. ``lie``: the header's own counts are kept."""
    blobs = []
    listed = []
    old = {(e["table"], e["name"]): e for e in header["columns"] if isinstance(e, dict)}
    for (table, name), values in columns.items():
        blob = zlib.compress(values.tobytes(), 1)
        blobs.append(blob)
        entry = {"table": table, "name": name, "typecode": values.typecode, "rows": len(values)}
        if lie:
            entry.update(old.get((table, name), {}))
        listed.append({**entry, "stored": len(blob), "crc32": zlib.crc32(blob)})
    raw = dumps(tables)
    blob = zlib.compress(raw, 1)
    blobs.append(blob)
    packed = {"length": len(raw), "stored": len(blob), "crc32": zlib.crc32(blob)}
    head = dumps({**header, "columns": listed, "tables": packed})
    prefix = PREFIX.pack(b"\x89GPTRC\r\n", 1, 0, len(head), zlib.crc32(head))
    return b"".join((prefix, head, *blobs))


def _change_chunk(rng: random.Random, data: bytes, pieces: list[bytes]) -> bytes:
    if rng.random() < 0.15:
        return change_bytes(rng, data, pieces)
    header, columns, tables = unpacked_chunk(data)
    kind = rng.randrange(4)
    if kind == 0:
        header = change_parts(rng, header)
        if not isinstance(header.get("columns"), list):
            header["columns"] = []
    elif kind == 1:
        tables = change_parts(rng, tables)
    elif kind == 2:
        for _ in range(rng.randint(1, 4)):
            values = columns[rng.choice(list(columns))]
            if not values:
                continue
            most = (1 << 8 * values.itemsize - (values.typecode.islower())) - 1
            at = rng.randrange(len(values))
            values[at] = rng.choice((0, 1, most, most // 2, min(most, 1 << 50), values[at] ^ 1))
    else:
        for name, values in list(columns.items()):
            if rng.random() < 0.3:
                columns[name] = array(values.typecode, reversed(values))
            elif rng.random() < 0.1:
                del columns[name]
            elif rng.random() < 0.1:
                columns[name] = values * rng.randint(0, 3)
    return packed_chunk(header, columns, tables, lie=rng.random() < 0.3)


def _pieces(seeds: list[Files]) -> list[bytes]:
    lines = {
        line for files in seeds for data in files.values() for line in data[:6000].split(b"\n")
    }
    return [*sorted(lines)[:400], b"\0" * 300, b"\xff" * 20, b"[" * 3000, b'{"type":"step"}', b"\n"]


def changed_recording(rng: random.Random, seeds: list[Files], pieces: list[bytes]) -> Files:
    """The files of a recording, one to three of them changed."""
    files = dict(rng.choice(seeds))
    for _ in range(rng.randint(1, 3)):
        name = rng.choice(list(files))
        kind = rng.randrange(12)
        try:
            if kind == 0:
                del files[name]
            elif kind == 1:
                files[rng.choice(list(files))] = files[name]
            elif kind == 2:
                files[name.replace("00000", "00007").replace("00001", "99999999")] = files[name]
            elif name.endswith(".cols"):
                files[name] = _change_chunk(rng, files[name], pieces)
            else:
                files[name] = change_lines(rng, files[name], pieces)
        except (KeyError, ValueError, TypeError, OverflowError, struct.error, zlib.error):
            files[name] = change_bytes(rng, files[name], pieces)  # it was changed before
        if not files:
            break
    return files


# -- snapshots

SHAPES = [modern(), torch_2_0(), without_frames(), modern()["segments"]]
PICKLES = [pickle.dumps(shape, protocol) for shape in SHAPES for protocol in range(6)]
PLAIN: list[Any] = [
    *(value for value in VALUES if type(value) is not dict), (), (0, 0), {"a": 1}, set(),
    frozenset(), bytearray(b"x"), b"x", 4096, 65535, 65536,
]  # fmt: skip


def changed_snapshot(rng: random.Random) -> bytes:
    """A pickle with bytes changed, or of a snapshot in which parts were replaced."""
    if rng.random() < 0.5:
        return change_bytes(rng, rng.choice(PICKLES), [*OPCODES, *PICKLES])
    return pickle.dumps(change_parts(rng, rng.choice(SHAPES), PLAIN), rng.randrange(6))


_WITHOUT_CODE = [value for value in PLAIN if type(value) not in (set, frozenset, bytes, bytearray)]
"""Values that are pickled without the name of a class or function, which no reader looks up."""

_DETAILS = ("filename", "line", "name", "user_metadata", "time_us", "compile_context", "stage")
_LISTED = ("frames", "external_annotations", "allocator_settings")


def changed_details(rng: random.Random) -> bytes:
    """A pickle of a snapshot of which only frames, tags, times, annotations and settings are
    changed: to anything at all."""
    snapshot = copy.deepcopy(rng.choice(SHAPES))
    found = list(_details(snapshot))
    for _ in range(rng.randint(1, 6)):
        at, key = rng.choice(found)
        if key not in at:
            continue
        if isinstance(at[key], (list, dict)) and at[key] and rng.random() < 0.5:
            at[key] = change_parts(rng, at[key], _WITHOUT_CODE)
        else:
            at[key] = copy.deepcopy(rng.choice(_WITHOUT_CODE))
    return pickle.dumps(snapshot, rng.randrange(6))


def _details(plain: Any) -> Iterator[tuple[Any, str]]:
    if isinstance(plain, dict):
        for key, value in plain.items():
            if key in (*_DETAILS, *_LISTED):
                yield plain, key
            if key != "allocator_settings":
                yield from _details(value)
    elif isinstance(plain, list):
        for item in plain:
            yield from _details(item)


# -- by number


def numbered(kind: str) -> Callable[[int, int], Files]:
    """A function of a seed and a number that makes the files of one mutated ``kind`` of input.

    ``recording``, ``snapshot``, ``details`` (a snapshot of which nothing is changed that accounts
    are made of), ``baseline``, ``log``, ``known``, ``tests``, ``settings``, ``catalogue``,
    ``configuration``. A recording is all its files; anything else is one file, "".
    """
    sys.set_int_max_str_digits(20_000)  # a number of 400 digits can be written, and 5,000
    if kind == "recording":
        seeds = recording_seeds()
        pieces = _pieces(seeds)
        return lambda seed, at: changed_recording(_rng(kind, seed, at), seeds, pieces)
    if kind == "snapshot":
        return lambda seed, at: {"": changed_snapshot(_rng(kind, seed, at))}
    if kind == "details":
        return lambda seed, at: {"": changed_details(_rng(kind, seed, at))}
    some, change = documents.DOCUMENTS[kind]
    seeds = some()
    parts = [*seeds, b'"x"', b"null", b"NaN", b"1e999", b"[" * 2000, b'{"a":' * 500, b"\xff"]
    parts += documents.PIECES.get(kind, [])
    return lambda seed, at: {"": change((rng := _rng(kind, seed, at)), rng.choice(seeds), parts)}


def _rng(kind: str, seed: int, number: int) -> random.Random:
    return random.Random(f"{kind}.{seed}.{number}")


KINDS = ("recording", "snapshot", "details", *documents.DOCUMENTS)
