"""The recording that the hostile ones are made of."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hostile_mutations import recording_seeds

STREAM, EXTRA = "rank-00000.jsonl", "rank-00001.jsonl"
CHUNK = "rank-00000.trace-000001.cols"
SOURCE = next(s for s in recording_seeds() if b"gpuprobe.recording" in s[STREAM][:30]
              and b"cuda:0" in s[STREAM] and b'"finding"' in s[STREAM]
              and CHUNK in s and EXTRA not in s)  # fmt: skip
LINES = [json.loads(line) for line in SOURCE[STREAM].splitlines()]


def plain(folder: Path) -> None:
    """The recording as it is."""
    for name, data in SOURCE.items():
        (folder / name).write_bytes(data)


def dumped(lines: list[Any]) -> bytes:
    return b"".join(json.dumps(line, separators=(",", ":")).encode() + b"\n" for line in lines)


def lazy(make: Callable[[], Callable[..., None]]) -> Callable[..., None]:
    """What ``make`` makes, made when it is called: some of it is a hundred megabytes."""
    return lambda *given: make()(*given)


def with_steps(steps: list[dict[str, Any]], folder: Path) -> None:
    """The recording with these steps before its end."""
    plain(folder)
    more = [{"type": "step", **step} for step in steps]
    (folder / STREAM).write_bytes(dumped([*LINES[:-1], *more, LINES[-1]]))
