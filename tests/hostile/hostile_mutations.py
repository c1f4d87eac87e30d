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
from collections.abc import Callable
from pathlib import Path
from typing import Any

from snapshot_samples import modern, torch_2_0, without_frames

V1 = Path(__file__).resolve().parent.parent / "recorded" / "v1"
Files = dict[str, bytes]

PREFIX = struct.Struct("<8sHHII")

VALUES: list[Any] = [
    None, True, False, -1, 0, 1, 2, 255, 1 << 16, 1 << 31, (1 << 53) + 1, (1 << 63) - 1, 1 << 63,
    (1 << 64) - 1, 1 << 64, -(1 << 63), 10**30, 10**400, 0.5, -0.0, 1e18, 1e300, -1e300, 5e-324,
    float("nan"), float("inf"), float("-inf"), {"float": "nan"}, {"float": "inf"},
    {"float": "-1e308"}, "", "x", "cpu", "cuda:0", "cuda:99999", "cuda:-1", "trace", "counters",
    "alloc", "oom", "inactive", "active_allocated", "user_defined", "\ud800", "\x1b[2J", "a\nb",
    "</script>", "../../etc/passwd", "rank-00000.trace-000000.cols", "x" * 5000, "é́" * 50, "\u202e",
    [], {}, [0, 0], [1, 2, 3], [[]], {"a": 1}, [None], {"unavailable": "why", "status": "lost"},
    {"unavailable": 5}, {"at_least": 5, "at_most": 1}, {"at_least": 0, "at_most": 1 << 63},
]  # fmt: skip

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


def change_bytes(rng: random.Random, data: bytes, pieces: list[bytes]) -> bytes:
    """Bytes flipped, cut out, inserted, doubled, spliced with ``pieces``, or cut off."""
    out = bytearray(data)
    for _ in range(rng.randint(1, 6)):
        if not out:
            break
        at = rng.randrange(len(out))
        kind = rng.randrange(7)
        if kind == 0:
            out[at] = rng.randrange(256)
        elif kind == 1:
            out[at] ^= 1 << rng.randrange(8)
        elif kind == 2:
            del out[at : at + rng.randint(1, 60)]
        elif kind == 3:
            out[at:at] = rng.choice(pieces) * rng.choice((1, 1, 1, 2, 50))
        elif kind == 4:
            other = rng.choice(pieces)
            start = rng.randrange(len(other)) if other else 0
            out[at:at] = other[start : start + rng.randint(1, 200)]
        elif kind == 5:
            out[at:at] = out[at : at + rng.randint(1, 100)] * rng.randint(1, 5)
        elif rng.random() < 0.3:
            del out[at:]
    return bytes(out)


def change_parts(rng: random.Random, plain: Any, values: list[Any] = VALUES) -> Any:
    """Plain data with one to five of its parts replaced, removed, doubled or renamed."""
    plain = copy.deepcopy(plain)
    for _ in range(rng.randint(1, 5)):
        at: Any = plain
        while True:
            keys = list(at) if isinstance(at, dict) else list(range(len(at)))
            if not keys:
                break
            key = rng.choice(keys)
            if isinstance(at[key], (dict, list)) and rng.random() < 0.85:
                at = at[key]
                continue
            kind = rng.randrange(6)
            if kind == 0:
                del at[key]
            elif kind == 1 and isinstance(at, list):
                at[key:key] = copy.deepcopy([at[key]] * rng.randint(1, 30))
            elif kind == 2 and isinstance(at, dict):
                at[rng.choice([*keys, "x", "\x1b]0;t\x07"])] = at.pop(key)
            elif kind == 3 and type(at[key]) in (int, float):
                at[key] = at[key] * rng.choice((-1, 2, 1000, 1 << 20, 1 << 40)) + rng.choice((0, 1))
            else:
                at[key] = copy.deepcopy(rng.choice(values))  # it may be changed next
            break
    return plain


def _json(plain: Any) -> bytes:
    return json.dumps(plain, separators=(",", ":")).encode("utf-8", "surrogatepass")


# -- recordings


def recording_seeds() -> list[Files]:
    """Each with the header of version 1, and with that of version 2."""
    found = []
    for folder in sorted(V1.glob("*.gpuprobe")):
        old = {path.name: path.read_bytes() for path in sorted(folder.iterdir())}
        found += [old, {name: _renewed(data) for name, data in old.items()}]
    return found


def _renewed(data: bytes) -> bytes:
    first, newline, rest = data.partition(b"\n")
    if not first.startswith(b"{"):
        return data
    head = json.loads(first)
    ranks = {key: head[key] for key in ("rank", "world_size")}
    made = {"schema": head["format"], "version": [2, 0], "gpuprobe": "0.1", **ranks}
    return _json(made) + newline + rest


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
    raw = _json(tables)
    blob = zlib.compress(raw, 1)
    blobs.append(blob)
    packed = {"length": len(raw), "stored": len(blob), "crc32": zlib.crc32(blob)}
    head = _json({**header, "columns": listed, "tables": packed})
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


def _change_stream(rng: random.Random, data: bytes, pieces: list[bytes]) -> bytes:
    if rng.random() < 0.2:
        return change_bytes(rng, data, pieces)
    lines = data.split(b"\n")
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(len(lines))
        kind = rng.randrange(8)
        if kind == 0 and at:
            del lines[at]
        elif kind == 1:
            lines[at:at] = [lines[at]] * rng.randint(1, 4)
        elif kind == 2:
            lines.insert(at, rng.choice(pieces))
        elif lines[at].startswith(b"{"):
            try:
                lines[at] = _json(change_parts(rng, json.loads(lines[at])))
            except ValueError:
                continue
        if not lines:
            break
    return b"\n".join(lines)


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
                files[name] = _change_stream(rng, files[name], pieces)
        except (KeyError, ValueError, TypeError, OverflowError, struct.error, zlib.error):
            files[name] = change_bytes(rng, files[name], pieces)  # it was changed before
        if not files:
            break
    return files


# -- files of one JSON document, or of lines of them


def changed_json(rng: random.Random, data: bytes, pieces: list[bytes]) -> bytes:
    if rng.random() < 0.4:
        return change_bytes(rng, data, pieces)
    return _json(change_parts(rng, json.loads(data)))


def changed_lines(rng: random.Random, data: bytes, pieces: list[bytes]) -> bytes:
    return _change_stream(rng, data, pieces)


TOML = b"""[project]
name = "x"
[tool.gpuprobe]
gpu = "h100-80gb"
run = "-m shop.train --fast"
steps = 6
baseline = "memory.json"
hazards = true
[tool.gpuprobe.tolerance]
peak_allocated = "2%"
peak_reserved = "2%, 64 MiB"
implicit_syncs_per_step = 1
growth_per_step = {relative = 0.02, absolute = "64 MiB"}
"""
TOML_VALUES = [
    "-1", "0", "1e999", "nan", "inf", "-inf", "true", "''", '"x"', "[]", "{}", "[[]]", "9" * 400,
    '"9e99999%"', '"1e400 MiB"', '"' + "9" * 5000 + '%"', '"' + "9" * 400 + ' TiB"', '"\\u0000"',
    '"\\u001b[2J"', '"\\"', "1979-05-27", "0x" + "f" * 40, '"-m"', '"\'"', "[1, 2]", '"/"',
    '["a", 5]', "{relative = nan}", "{relative = 1e400, absolute = 5}", "{absolute = {}}",
    "9007199254740993", "[" * 50 + "]" * 50,
]  # fmt: skip


def changed_toml(rng: random.Random, data: bytes, pieces: list[bytes]) -> bytes:
    if rng.random() < 0.4:
        return change_bytes(rng, data, pieces)
    lines = data.decode().split("\n")
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(len(lines))
        key, equals, _ = lines[at].partition("=")
        kind = rng.randrange(5)
        if kind == 0:
            del lines[at]
        elif kind == 1:
            lines.insert(rng.randrange(len(lines)), lines[at])
        elif equals:
            lines[at] = f"{key}= {rng.choice(TOML_VALUES)}"
        if not lines:
            break
    return "\n".join(lines).encode()


CATALOGUE = {
    "schema_version": 1,
    "gpus": [
        {"name": "mine", "like": "h100-80gb", "total_memory": 1 << 36, "aliases": ["own"]},
        {
            "name": "other",
            "title": "Other GPU",
            "capability": "9.0",
            "multi_processor_count": 100,
            "total_memory": 1 << 35,
            "context": [1 << 28, 1 << 29],
            "sources": {"total_memory": "measured"},
            "total_memory_seen": {"1": "somewhere"},
        },
        {"name": "third", "like": "mine", "clock_rate": 1500000},
    ],
}


def catalogue_seeds() -> list[bytes]:
    return [_json(CATALOGUE), json.dumps(CATALOGUE, indent=1).encode()]


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


# -- by number


def numbered(kind: str) -> Callable[[int, int], Files]:
    """A function of a seed and a number that makes the files of one mutated ``kind`` of input.

    ``recording``, ``snapshot``, ``baseline``, ``log``, ``hazards``, ``settings``, ``catalogue``,
    ``configuration``. A recording is all its files; anything else is one file, named "".
    """
    sys.set_int_max_str_digits(20_000)  # a number of 400 digits can be written, and 5,000
    if kind == "recording":
        seeds = recording_seeds()
        pieces = _pieces(seeds)
        return lambda seed, at: changed_recording(_rng(kind, seed, at), seeds, pieces)
    if kind == "snapshot":
        return lambda seed, at: {"": changed_snapshot(_rng(kind, seed, at))}
    some, change = _DOCUMENTS[kind]
    documents = some()
    parts = [*documents, b'"x"', b"null", b"NaN", b"1e999", b"[" * 2000, b'{"a":' * 500, b"\xff"]
    return lambda seed, at: {
        "": change((rng := _rng(kind, seed, at)), rng.choice(documents), parts)
    }


def _rng(kind: str, seed: int, number: int) -> random.Random:
    return random.Random(f"{kind}.{seed}.{number}")


def _file(name: str) -> Callable[[], list[bytes]]:
    return lambda: [(V1 / name).read_bytes()]


def log_seeds() -> list[bytes]:
    """The recorded log, shortened: a reading of a whole fleet is 90 KB."""
    lines = (V1 / "readings.jsonl").read_bytes().splitlines(keepends=True)
    return [b"".join(lines[:4])]


_DOCUMENTS: dict[str, tuple[Callable[[], list[bytes]], Callable[..., bytes]]] = {
    "baseline": (_file("baseline.json"), changed_json),
    "hazards": (_file("hazards.json"), changed_json),
    "known": (_file("hazards-baseline.json"), changed_json),
    "log": (log_seeds, changed_lines),
    "settings": (lambda: [b'{"theme":"dark","sort":"memory","reverse":true}'], changed_json),
    "catalogue": (catalogue_seeds, changed_json),
    "configuration": (lambda: [TOML], changed_toml),
}
KINDS = ("recording", "snapshot", *_DOCUMENTS)
