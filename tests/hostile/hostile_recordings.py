"""Two hundred recordings that were made to do harm, by name.

Each is a function that makes the files in an empty folder. `GROUPS` says what each group is after.
"""

# ruff: noqa: E501

from __future__ import annotations

import copy
import json
import os
import socket
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from hostile_chunks import BYTES, CHUNKS, LIES, chunk, chunk_bytes, many_chunks
from hostile_seed import CHUNK, EXTRA, LINES, SOURCE, STREAM, dumped, lazy, plain

Make = Callable[[Path], None]

# -- a file's place is taken by something else


def _fifo(path: Path) -> None:
    os.mkfifo(path)


def _socket(path: Path) -> None:
    here = Path.cwd()
    os.chdir(path.parent)  # a socket's path is short
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(path.name)
    finally:
        os.chdir(here)


def _link(to: str, path: Path) -> None:
    path.symlink_to(to)


def _link_to_fifo(path: Path) -> None:
    os.mkfifo(path.with_name("pipe"))
    path.symlink_to("pipe")


def _outside(path: Path) -> None:
    """A link to a good file of the same name, outside the folder."""
    elsewhere = path.parent.parent / "elsewhere"
    elsewhere.mkdir(exist_ok=True)
    (elsewhere / path.name).write_bytes(SOURCE.get(path.name, SOURCE[STREAM]))
    path.symlink_to(elsewhere / path.name)


def _sparse(size: int, path: Path) -> None:
    with path.open("wb") as file:
        file.write(SOURCE.get(path.name, SOURCE[STREAM]))
        file.truncate(size)


INSTEAD: dict[str, Callable[[Path], None]] = {
    "a pipe": _fifo,
    "a socket": _socket,
    "a folder": lambda path: path.mkdir(),
    "a link to /dev/zero": partial(_link, "/dev/zero"),
    "a link to /dev/random": partial(_link, "/dev/random"),
    "a link to /dev/kmsg": partial(_link, "/dev/kmsg"),
    "a link to /dev/tty": partial(_link, "/dev/tty"),
    "a link to /dev/stdin": partial(_link, "/dev/stdin"),
    "a link to /proc/self/mem": partial(_link, "/proc/self/mem"),
    "a link to /proc/kcore": partial(_link, "/proc/kcore"),
    "a link to itself": lambda path: path.symlink_to(path.name),
    "a link to nothing": partial(_link, "nothing"),
    "a link to a pipe": _link_to_fifo,
    "a link out of the folder": _outside,
    "a sparse file of 1 TB": partial(_sparse, 10**12),
    "a sparse file of 60 MiB": partial(_sparse, 60 << 20),
    "an empty file": lambda path: path.write_bytes(b"") and None,
}


def _instead(name: str, what: Callable[[Path], None], folder: Path) -> None:
    plain(folder)
    (folder / name).unlink(missing_ok=True)
    what(folder / name)


# -- the header


def _with_header(header: Callable[[], bytes], folder: Path) -> None:
    plain(folder)
    rest = SOURCE[STREAM].partition(b"\n")[2]
    (folder / STREAM).write_bytes(header() + rest)


def _header(**change: Any) -> bytes:
    return json.dumps({**LINES[0], **change}).encode() + b"\n"


_GOOD_HEADER = SOURCE[STREAM].partition(b"\n")[0]

HEADERS: dict[str, Callable[[], bytes]] = {
    "rank -1": lambda: _header(rank=-1),
    "rank 2**63": lambda: _header(rank=1 << 63),
    "rank 0.5": lambda: _header(rank=0.5),
    "rank of a list": lambda: _header(rank=[0]),
    "world of 0": lambda: _header(world_size=0),
    "world of two billion": lambda: _header(world_size=(1 << 31) - 1),
    "world of 2**64": lambda: _header(world_size=1 << 64),
    "world of 10**400": lambda: (
        _GOOD_HEADER.replace(b'"world_size":1', b'"world_size":1' + b"0" * 400) + b"\n"
    ),
    "rank of 5,000 digits": lambda: (
        _GOOD_HEADER.replace(b'"rank":0', b'"rank":1' + b"0" * 5000) + b"\n"
    ),
    "version 1e400": lambda: _GOOD_HEADER.replace(b"[2,0]", b"[1e400,0]") + b"\n",
    "version 2**70": lambda: _header(version=[1 << 70, 0]),
    "version 99": lambda: _header(version=[99, 0]),
    "version of three": lambda: _header(version=[2, 0, 0]),
    "no version": lambda: _header(version=None),
    "no line end": lambda: _GOOD_HEADER,
    "a line of 100 MB": lambda: _GOOD_HEADER[:-1] + b" " * 100_000_000 + b"}\n",
    "a line of 100 MB without an end": lambda: (
        b'{"schema":"gpuprobe.recording"' + b"," * 100_000_000
    ),
    "nested 100,000 deep": lambda: _GOOD_HEADER[:-1] + b',"x":' + b"[" * 100_000 + b"\n",
    "a byte order mark": lambda: b"\xef\xbb\xbf" + _GOOD_HEADER + b"\n",
    "UTF-16": lambda: _GOOD_HEADER.decode().encode("utf-16"),
    "other line ends": lambda: _GOOD_HEADER + b"\r\n",
    "NULs": lambda: b"\0" * 4096,
    "a pickle": lambda: b"\x80\x04cos\nsystem\n",
    "gzip": lambda: zlib.compress(SOURCE[STREAM]),
}


# -- numbers, one at a time

_NUMBERS: dict[str, tuple[str, ...]] = {
    "session": ("started_at", "pid", "rank", "local_rank", "world_size"),
    "step": (
        "index", "start_ns", "duration_ns", "gpu_ns", "phases.1.duration_ns", "phases.1.start_ns",
        "phases.1.entries", "phases.1.gpu_ns", "phases.1.windows.0.end.allocated",
        "phases.1.windows.0.peak_allocated.at_most", "windows.0.end.reserved",
        "windows.0.end.active", "windows.0.peak_allocated.at_least",
        "windows.0.peak_reserved.at_most", "windows.0.activity.ooms", "windows.0.inactive_split",
        "windows.0.device_used", "host.rss_end", "host.rss_peak.at_most", "host.pinned",
        "collectives.0.bytes", "collectives.0.host_ns", "collectives.0.count",
        "placement.0.bytes", "tensors.0.rest", "tensors.0.by_category.parameter",
    ),
    "end": ("duration_ns",),
    "finding": ("count", "location.line", "related.0.line"),
    "environment": ("cpu_count", "total_memory"),
}  # fmt: skip
_EXTREME: dict[str, Any] = {
    "2**64 - 1": (1 << 64) - 1,
    "-2**63": -(1 << 63),
    "10**400": 10**400,
    "not a number": {"float": "nan"},
}
_OPTIONAL: dict[str, Any] = {
    "collectives": [{"op": "all_reduce", "count": 1, "bytes": 64, "host_ns": 5}],
    "placement": [{"what": "module", "name": "fc", "device": "cuda:0", "bytes": 64}],
    "tensors": [{"device": "cuda:0", "by_category": {"parameter": 64}, "rest": 5}],
}


def _set(at: Any, path: str, value: Any) -> None:
    *way, last = path.split(".")
    for key in way:
        at = at[int(key)] if key.isdecimal() else at[key]
    at[last] = value


def _number(kind: str, path: str, value: Any, folder: Path) -> None:
    lines = copy.deepcopy(LINES)
    for line in lines:
        if line.get("type") == kind and (kind != "step" or line["index"] == 2):
            for name, example in _OPTIONAL.items():
                if path.startswith(name):
                    line.setdefault(name, copy.deepcopy(example))
            _set(line, path, value)
    plain(folder)
    (folder / STREAM).write_bytes(dumped(lines))


# -- counts


def _with_lines(change: Callable[[list[Any]], None], folder: Path) -> None:
    lines = copy.deepcopy(LINES)
    change(lines)
    plain(folder)
    (folder / STREAM).write_bytes(dumped(lines))


def _steps(lines: list[Any]) -> list[Any]:
    return [line for line in lines if line.get("type") == "step"]


def _the(lines: list[Any], kind: str) -> Any:
    return next(line for line in lines if line.get("type") == kind)


def _many_steps(count: int, lines: list[Any]) -> None:
    at = lines.index(_steps(lines)[0])
    lines[at:at] = [
        {"type": "step", "index": 10 + n, "start_ns": n, "duration_ns": 1} for n in range(count)
    ]


def _in_step(key: str, items: list[Any], lines: list[Any]) -> None:
    _steps(lines)[1][key] = items


def _in_phase(key: str, value: Any, lines: list[Any]) -> None:
    _steps(lines)[1]["phases"][1][key] = value


def _window(device: str) -> dict[str, Any]:
    counts = {"allocated": 512, "active": 512, "reserved": 2048, "requested": 500}
    return {"device": device, "start": counts, "end": counts,
            "peak_allocated": {"at_least": 512, "at_most": 512}}  # fmt: skip


def _phase(path: str) -> dict[str, Any]:
    return {"path": path, "start_ns": 0, "duration_ns": 1, "entries": 1}


def _finding(at: int) -> dict[str, Any]:
    return {**_the(LINES, "finding"), "fingerprint": f"{at:016x}"}


def _add(kind: str, items: list[Any], lines: list[Any]) -> None:
    lines[-1:-1] = [{"type": kind, **item} for item in items]


def _devices(count: int, lines: list[Any]) -> None:
    names = [f"cuda:{n}" for n in range(count)]
    _the(lines, "session")["devices"] = names
    for step in _steps(lines):
        step["windows"] = [_window(name) for name in names]


def _exchange(**changes: Any) -> dict[str, Any]:
    """Operations of a step, each recorded."""
    plain = {
        "group": "0", "ranks": 2, "op": "all_reduce", "payload": 4, "wire": 4, "place": "a.py:1",
        "members": "0-1", "sequence": [1], "arrival_ns": [1], "completion_ns": [2],
    }  # fmt: skip
    return plain | changes


def _exchanges(count: int, changes: Callable[[int], dict[str, Any]]) -> Any:
    return lazy(
        lambda: partial(_in_step, "exchanges", [_exchange(**changes(n)) for n in range(count)])
    )


def _indices(values: list[int], lines: list[Any]) -> None:
    for step, index in zip(_steps(lines), values, strict=False):
        step["index"] = index


def _set_text(kind: str, key: str, value: Any, lines: list[Any]) -> None:
    _the(lines, kind)[key] = value


COUNTS: dict[str, Callable[[list[Any]], None]] = {
    "100,000 phases": lazy(lambda: partial(_in_step, "phases", [_phase(f"p{n}") for n in range(100_000)])),
    "100,000 nested phases": lazy(lambda: partial(
        _in_step, "phases", [_phase("/".join("p" * (n % 300 + 1))) for n in range(100_000)]
    )),
    "a phase nested 100,000 deep": lazy(lambda: partial(_in_step, "phases", [_phase("a/" * 100_000 + "a")])),
    "100,000 phases of one name": lazy(lambda: partial(_in_step, "phases", [_phase("forward")] * 100_000)),
    "100,000 windows": lazy(lambda: partial(
        _in_step, "windows", [_window(f"cuda:{n}") for n in range(100_000)]
    )),
    "100,000 windows of one device": lazy(lambda: partial(_in_step, "windows", [_window("cuda:0")] * 100_000)),
    "20,000 devices in every step": lazy(lambda: partial(_devices, 20_000)),
    "windows of a phase of 50,000 devices": lazy(lambda: partial(
        _in_phase, "windows", [_window(f"cuda:{n}") for n in range(50_000)]
    )),
    "200,000 steps": lazy(lambda: partial(_many_steps, 200_000)),
    "a trace named 500,000 times in a step": lazy(lambda: partial(_in_step, "traces", [CHUNK] * 500_000)),
    "a trace named in every one of 50,000 steps": lambda lines: _add(
        "step",
        [{"index": n, "start_ns": n, "duration_ns": 1, "traces": [CHUNK]} for n in range(50_000)],
        lines,
    ),
    "200,000 traces that are not there": lazy(lambda: partial(
        _in_step, "traces", [f"rank-00000.trace-{n:06d}.cols" for n in range(200_000)]
    )),
    "a trace with a path": lazy(lambda: partial(_in_step, "traces", ["../../../etc/passwd", "/dev/zero"])),
    "a trace of another rank": lazy(lambda: partial(_in_step, "traces", ["rank-00001.trace-000000.cols"])),
    "100,000 collectives": lazy(lambda: partial(
        _in_step, "collectives",
        [{"op": f"op{n}", "count": 1, "bytes": 1, "host_ns": 1} for n in range(100_000)],
    )),
    "100,000 placed modules": lazy(lambda: partial(
        _in_step, "placement",
        [{"what": "module", "name": "a." * (n % 50) + f"m{n}", "device": "cpu", "bytes": 5}
         for n in range(100_000)],
    )),
    "100,000 devices of tensors": lazy(lambda: partial(
        _in_step, "tensors", [{"device": f"cuda:{n}"} for n in range(100_000)]
    )),
    "100,000 findings": lazy(lambda: partial(_add, "finding", [_finding(n) for n in range(100_000)])),
    "a finding with 200,000 related places": lazy(lambda: partial(
        _add, "finding",
        [{**_finding(1), "related": [{"file": "a.py", "line": n} for n in range(200_000)]}],
    )),
    "a finding with 200,000 pieces of evidence": lazy(lambda: partial(
        _add, "finding",
        [{**_finding(1), "evidence": [{"name": "x", "value": "y"}] * 200_000}],
    )),
    "100,000 blind spots": lazy(lambda: partial(
        _add, "blind_spot", [{"what": f"w{n}", "consequence": "c"} for n in range(100_000)]
    )),
    "100,000 faults of gpuprobe": lazy(lambda: partial(
        _set_text, "end", "gpuprobe_faults", [f"fault {n}" for n in range(100_000)]
    )),
    "an error of 10 MB": lazy(lambda: partial(
        _set_text, "end", "error", {"type": "E", "message": "x" * 10_000_000}
    )),
    "a million arguments": lazy(lambda: partial(_set_text, "session", "argv", ["x"] * 1_000_000)),
    "an argument of 10 MB": lazy(lambda: partial(_set_text, "session", "argv", ["x" * 10_000_000])),
    "a host name of 10 MB": lazy(lambda: partial(_set_text, "environment", "hostname", "x" * 10_000_000)),
    "allocator settings of 10 MB": lazy(lambda: partial(
        _set_text, "environment", "allocator_conf", "a:1," * 2_500_000
    )),
    "a folder of 10 MB": lazy(lambda: partial(_set_text, "session", "cwd", "/x" * 5_000_000)),
    "100,000 devices of a session": lazy(lambda: partial(
        _set_text, "session", "devices", [f"cuda:{n}" for n in range(100_000)]
    )),
    "steps at both ends": lazy(lambda: partial(_indices, [0, (1 << 63) - 1, 1 << 62])),
    "negative steps": lazy(lambda: partial(_indices, [-1, -(1 << 62), 5])),
    "findings at places that are no source": lambda lines: _add(
        "finding",
        [
            {**_finding(n), "location": {"file": name, "line": 1}}
            for n, name in enumerate(("/dev/zero", "/dev/stdin", "/proc/kmsg", "/proc/self/mem"))
        ],
        lines,
    ),
    "a rank that is not its own": lazy(lambda: partial(_set_text, "session", "rank", 12345)),
    "a world of two billion": lazy(lambda: partial(_set_text, "session", "world_size", (1 << 31) - 1)),
    "a level that is none": lazy(lambda: partial(_set_text, "session", "level", "\x1b[2J")),
}  # fmt: skip


_HUGE = (1 << 53) - 1
EXCHANGES: dict[str, Callable[[list[Any]], None]] = {
    "of a kind that is none": _exchanges(3, lambda n: {"op": f"op\x1b[2J{n}"}),
    "in a group of all numbers": _exchanges(1, lambda _: {"members": f"0-{_HUGE}", "ranks": _HUGE}),
    "in a group of 100,000 digits": _exchanges(1, lambda _: {"members": "9" * 100_000}),
    "in a group that is none": _exchanges(4, lambda n: {"members": ("x", "3-1", ",,", "-")[n]}),
    "in 9,999 groups": _exchanges(9_999, lambda n: {"members": f"0-{n + 10**6}", "ranks": 10**7}),
    "500,000 in one": _exchanges(
        1, lambda _: dict.fromkeys(("sequence", "arrival_ns", "completion_ns"), [1] * 500_000)
    ),
    "100,000 of one each": _exchanges(100_000, lambda n: {"module": f"m{n}"}),
    "10,000 of one each": _exchanges(10_000, lambda n: {"module": f"m{n}", "place": f"a{n}.py:1"}),
    "with fewer times": _exchanges(1, lambda _: {"sequence": [1, 2, 3], "arrival_ns": [5]}),
    "that end before they begin": _exchanges(1, lambda _: {"arrival_ns": [10**18]}),
    "with a module of 10 MB": _exchanges(1, lambda _: {"module": "m" * 10_000_000}),
    "with a place of 10 MB": _exchanges(1, lambda _: {"place": "p/" * 5_000_000 + "a.py:1"}),
    "to a rank that is none": _exchanges(1, lambda _: {"op": "send", "peer": (1 << 31) - 1}),
    "of an exbibyte": _exchanges(9, lambda _: {"payload": (1 << 60) - 1, "wire": (1 << 60) - 1}),
}


def _raw_lines(lines: Callable[[], list[bytes]], folder: Path) -> None:
    plain(folder)
    with (folder / STREAM).open("ab") as file:
        for line in lines():
            file.write(line + b"\n")


RAW: dict[str, Callable[[], list[bytes]]] = {
    "a line of 65 MB": lambda: [b'{"type":"step","index":' + b"1" * 65_000_000 + b"}"],
    "a line of 30 MB of lists": lambda: [b'{"type":"step","phases":[' + b"[]," * 10_000_000 + b"[]]}"],
    "a line of 30 MB of objects": lambda: [b'{"type":"x","y":[' + b"{}," * 10_000_000 + b"{}]}"],
    "a step nested 500,000 deep": lambda: [b'{"type":"step","phases":' + b"[" * 500_000],
    "a key nested 500,000 deep": lambda: [b'{"type":"step","x":' + b'{"a":' * 500_000],
    "a million lines that are none": lambda: [b"x"] * 1_000_000,
    "a million lines of lists": lambda: [b"[]"] * 1_000_000,
    "a million lines of a type that is unknown": lambda: [b'{"type":"later"}'] * 1_000_000,
    "a type that is a list": lambda: [b'{"type":[]}', b'{"type":{}}', b'{"type":null}'],
    "a number of 4,000 digits": lambda: [b'{"type":"step","index":' + b"9" * 4000 + b"}"],
    "lone surrogates": lambda: [b'{"type":"blind_spot","what":"\\ud800","consequence":"\\udfff\\u0000"}'],
    "bytes that are no text": lambda: [b'{"type":"blind_spot","what":"\xff\xfe","consequence":""}'],
    "a session again": lambda: [b'{"type":"session","started_at":1e18,"pid":-1,"argv":[],"level":"",'
                        b'"devices":[]}'],
}  # fmt: skip


def _many_ranks(count: int, folder: Path) -> None:
    for n in range(count):
        head = json.dumps({**LINES[0], "rank": n, "world_size": count}).encode() + b"\n"
        data = head + dumped([_the(LINES, "environment"), _the(LINES, "session")])
        (folder / f"rank-{n:05d}.jsonl").write_bytes(data)


def _empty_ranks(count: int, folder: Path) -> None:
    for n in range(count):
        (folder / f"rank-{n:05d}.jsonl").touch()


def _rank_of_many_digits(folder: Path) -> None:
    plain(folder)
    (folder / f"rank-{'9' * 200}.jsonl").write_bytes(SOURCE[STREAM])


def _nothing(folder: Path) -> None:
    (folder / "readme.txt").write_text("x")


RANKS: dict[str, Make] = {
    "3,000 ranks": partial(_many_ranks, 3000),
    "20,000 empty streams": partial(_empty_ranks, 20_000),
    "a rank of 200 digits": _rank_of_many_digits,
    "no stream": _nothing,
    "two ranks, one name": lambda folder: _instead(
        EXTRA, lambda path: path.write_bytes(SOURCE[STREAM]) and None, folder
    ),
}


def _all_groups() -> dict[str, dict[str, Make]]:
    return {
        "something else in a stream's place": {
            what: partial(_instead, STREAM, how) for what, how in INSTEAD.items()
        },
        "something else as another stream": {
            what: partial(_instead, EXTRA, how) for what, how in INSTEAD.items()
        },
        "something else in a chunk's place": {
            what: partial(_instead, CHUNK, how) for what, how in INSTEAD.items()
        },
        "header": {what: partial(_with_header, data) for what, data in HEADERS.items()},
        "numbers": {
            f"{kind} {path} = {name}": partial(_number, kind, path, value)
            for number, (kind, path) in enumerate(
                (kind, path) for kind, paths in _NUMBERS.items() for path in paths
            )
            for name, value in _chosen(number)
        },
        "counts": {what: partial(_with_lines, change) for what, change in COUNTS.items()},
        "exchanges": {what: partial(_with_lines, change) for what, change in EXCHANGES.items()},
        "lines": {what: partial(_raw_lines, lines) for what, lines in RAW.items()},
        "ranks": RANKS,
        "chunks": {what: partial(chunk, change) for what, change in CHUNKS.items()},
        "chunks that lie": {
            what: partial(chunk, change, lie=True) for what, change in LIES.items()
        },
        "bytes of a chunk": {what: partial(chunk_bytes, change) for what, change in BYTES.items()},
        "many chunks": {
            "2,000 of a million rows": partial(many_chunks, 2_000, 1_000_000),
            "20,000 of a thousand rows": partial(many_chunks, 20_000, 1_000),
        },
    }


def _chosen(number: int) -> list[tuple[str, Any]]:
    """Two of the extreme values for each number, in turn: all four would be 150 recordings."""
    named = list(_EXTREME.items())
    return [named[number % 4], named[(number + 1) % 4]] if number % 3 else [named[number % 4]]


GROUPS = _all_groups()
CRAFTED: dict[str, Make] = {
    f"{group}: {what}": make for group, made in GROUPS.items() for what, make in made.items()
}
