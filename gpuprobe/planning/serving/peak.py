"""What is allocated at the peak of a part of a program, by line, from torch's memory history."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

_MOST_EVENTS: Final = 400_000
_MOST_ROWS: Final = 20
_NOT_THE_MODEL: Final = (
    f"{os.sep}torch{os.sep}",
    f"{os.sep}triton{os.sep}",
    f"{os.sep}gpuprobe{os.sep}",
    f"{os.sep}vllm{os.sep}compilation{os.sep}",
    f"{os.sep}vllm{os.sep}_custom_ops.py",
    f"{os.sep}functools.py",
    f"{os.sep}contextlib.py",
    "inductor",
    "torch_compile_cache",
    "<",
)


class PeakRow(NamedTuple):
    """Bytes of blocks that one line allocated."""

    place: str
    function: str
    bytes: int


@dataclass
class HighestMoment:
    """The most that was allocated at one time since the beginning, in bytes; and by line."""

    bytes: int = 0
    rows: list[PeakRow] = field(default_factory=list)


@contextlib.contextmanager
def at_peak() -> Iterator[HighestMoment]:
    """Trace the allocations of the block on the current device, and find its peak at its end."""
    import torch

    found = HighestMoment()
    record = torch.cuda.memory._record_memory_history
    record("all", context="alloc", stacks="python", max_entries=_MOST_EVENTS)
    try:
        yield found
        device = torch.cuda.current_device()
        snapshot = torch.cuda.memory._snapshot(device)
        traces = snapshot["device_traces"]
        highest(traces[device if device < len(traces) else 0], found)
    finally:
        record(None)


def highest(events: Sequence[dict[str, Any]], found: HighestMoment) -> None:
    """Fill in ``found`` from the events of one device, in torch's format."""
    live = 0
    top, when = 0, -1
    sizes: dict[int, int] = {}
    for index, event in enumerate(events):
        if event["action"] == "alloc":
            sizes[event["addr"]] = event["size"]
            live += event["size"]
            if live > top:
                top, when = live, index
        elif event["action"] == "free_completed":
            live -= sizes.pop(event["addr"], 0)
    blocks: dict[int, dict[str, Any]] = {}
    for event in events[: when + 1]:
        if event["action"] == "alloc":
            blocks[event["addr"]] = event
        elif event["action"] == "free_completed":
            blocks.pop(event["addr"], None)
    rows: dict[tuple[str, str], int] = {}
    for block in blocks.values():
        key = _line(block.get("frames", ()))
        rows[key] = rows.get(key, 0) + block["size"]
    ordered = sorted(rows.items(), key=lambda item: (-item[1], item[0]))
    found.bytes = top
    found.rows = [PeakRow(place, name, size) for (place, name), size in ordered[:_MOST_ROWS]]


def _line(frames: Sequence[dict[str, Any]]) -> tuple[str, str]:
    """The innermost frame that is not torch's or of compiled code: its place and function."""
    for frame in frames:
        file = frame["filename"]
        if not any(part in file for part in _NOT_THE_MODEL):
            return f"{file}:{frame['line']}", frame["name"]
    return ("", "") if not frames else (f"{frames[0]['filename']}:{frames[0]['line']}", "")
