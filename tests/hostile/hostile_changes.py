"""Bytes and plain data changed at random, from a generator that is given."""

from __future__ import annotations

import copy
import json
import random
from pathlib import Path
from typing import Any

RECORDED = Path(__file__).resolve().parent.parent / "recorded" / "v2"

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

LIKE: dict[type, list[Any]] = {
    bool: [True, False],
    int: [
        0, 1, 2, 7, 511, 512, 1 << 20, 1 << 32, 1 << 40, (1 << 49) - 512, (1 << 53) - 1, 10**18,
        (1 << 60) - 1,
    ],
    float: [0.0, -0.0, 1e-300, 0.1, 1.0, 99.9, 1e6, 1e18, 1_700_000_000.5, 253_402_214_399.0],
    str: [
        "", "x", "a b", "x" * 3000, "\x1b]0;t\x07", "a\nb\r\n", "\u202eabc", "\ud800", "{}",
        "[b]x[/]",
        "</script><b>", "é́" * 20, "%s %d {0}", "/" * 200, "a/b/c", "cuda:1", "cpu", "other",
        "0" * 400, "nan", "-1", "::error::x", "漢字" * 30,
    ],
    list: [[]],
    dict: [{}],
    type(None): [None],
}  # fmt: skip
"""Values of the same type, within bounds: what is changed to one of them often passes the reader,
and reaches the analyses and reporters."""


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
    """Plain data with one to five of its parts replaced, removed, doubled or renamed. Half of the
    data that is changed keeps the types that its reader expects."""
    plain = copy.deepcopy(plain)
    alike = rng.random() < 0.5
    for _ in range(rng.choice((1, 1, 1, 2, 5))):
        at: Any = plain
        while True:
            keys = list(at) if isinstance(at, dict) else list(range(len(at)))
            if not keys:
                break
            key = rng.choice(keys)
            if isinstance(at[key], (dict, list)) and rng.random() < 0.85:
                at = at[key]
                continue
            _change_part(rng, at, key, keys, values, alike)
            break
    return plain


def _change_part(
    rng: random.Random, at: Any, key: Any, keys: list[Any], values: list[Any], alike: bool
) -> None:
    kind = rng.randrange(6)
    if alike and kind != 3:
        if isinstance(at, list) and kind == 1:
            at[key:key] = copy.deepcopy([at[key]] * rng.randint(1, 30))
        elif isinstance(at, list) and kind == 0:
            del at[key]
        else:
            same = LIKE.get(type(at[key]), values)
            at[key] = copy.deepcopy(rng.choice(same))
    elif kind == 0:
        del at[key]
    elif kind == 1 and isinstance(at, list):
        at[key:key] = copy.deepcopy([at[key]] * rng.randint(1, 30))
    elif kind == 2 and isinstance(at, dict):
        at[rng.choice([*keys, "x", "\x1b]0;t\x07"])] = at.pop(key)
    elif kind == 3 and type(at[key]) in (int, float):
        at[key] = at[key] * rng.choice((-1, 2, 1000, 1 << 20, 1 << 40)) + rng.choice((0, 1))
    else:
        at[key] = copy.deepcopy(rng.choice(values))  # it may be changed next


def dumps(plain: Any) -> bytes:
    return json.dumps(plain, separators=(",", ":")).encode("utf-8", "surrogatepass")


def change_lines(rng: random.Random, data: bytes, pieces: list[bytes]) -> bytes:
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
                lines[at] = dumps(change_parts(rng, json.loads(lines[at])))
            except ValueError:
                continue
        if not lines:
            break
    return b"\n".join(lines)
