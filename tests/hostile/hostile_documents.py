"""The documents that gpuprobe reads besides recordings and snapshots, and how each is changed."""

from __future__ import annotations

import contextlib
import io
import json
import random
import tempfile
from collections.abc import Callable
from pathlib import Path

from hostile_changes import RECORDED, change_bytes, change_lines, change_parts, dumps


def changed_json(rng: random.Random, data: bytes, pieces: list[bytes]) -> bytes:
    if rng.random() < 0.4:
        return change_bytes(rng, data, pieces)
    try:
        plain = json.loads(data)
    except ValueError:  # one with marks of a merge
        return change_bytes(rng, data, pieces)
    return dumps(change_parts(rng, plain))


def changed_lines(rng: random.Random, data: bytes, pieces: list[bytes]) -> bytes:
    return change_lines(rng, data, pieces)


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
    return [dumps(CATALOGUE), json.dumps(CATALOGUE, indent=1).encode()]


def log_seeds() -> list[bytes]:
    """The recorded log, shortened: a reading of a whole fleet is 90 KB."""
    lines = (RECORDED / "readings.jsonl").read_bytes().splitlines(keepends=True)
    return [b"".join(lines[:4])]


def baseline_seeds() -> list[bytes]:
    """The recorded one, of an older version, and one that this version makes of a recording, with
    tolerances; a conflict of the two."""
    from gpuprobe.cli import main

    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stderr(io.StringIO()):
        path = Path(folder, "new.json")
        with contextlib.redirect_stdout(io.StringIO()):
            main(
                ["baseline", "update", str(RECORDED / "virtual.gpuprobe"), "--baseline", str(path)]
            )
        new = json.loads(path.read_bytes())
    new["tolerance"] = {
        "peak_allocated": {"relative": 0.02, "absolute": 1024},
        "peak_reserved": {"relative": 0.1},
    }
    old = (RECORDED / "baseline.json").read_bytes()
    today = json.dumps(new, indent=1).encode()
    lines = today.split(b"\n")
    middle = b"\n".join([b"<<<<<<< a", *lines[5:9], b"=======", *lines[5:9], b">>>>>>> b"])
    return [old, today, b"\n".join([*lines[:5], middle, *lines[9:]])]


TESTS = {
    "schema": "gpuprobe.tests",
    "version": [1, 0],
    "tests": {
        "test_a.py::test_one": {
            "group": "", "left": 0, "peak_allocated": 512, "peak_reserved": 2097152,
        },
        "test_a.py::test_two[x]": {
            "group": "g", "left": 1024, "peak_allocated": 1 << 30, "peak_reserved": 1 << 31,
        },
    },
}  # fmt: skip


DOCUMENTS: dict[str, tuple[Callable[[], list[bytes]], Callable[..., bytes]]] = {
    "baseline": (baseline_seeds, changed_json),
    "log": (log_seeds, changed_lines),
    "tests": (lambda: [json.dumps(TESTS, indent=1).encode()], changed_json),
    "settings": (lambda: [b'{"theme":"dark","sort":"memory","reverse":true}'], changed_json),
    "catalogue": (catalogue_seeds, changed_json),
    "configuration": (lambda: [TOML], changed_toml),
}
PIECES = {"baseline": [b"\n<<<<<<< a\n", b"\n=======\n", b"\n>>>>>>> b\n", b"\n||||||| c\n"]}
"""What is spliced in besides: the marks of a merge."""
