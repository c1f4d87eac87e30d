"""Allocator history on CUDA: level ``trace`` where torch keeps one.

torch's own memory history is switched on for one step at a time, with Python stacks only
(``stacks="all"`` makes a dump a hundred times slower), and read at the step's end. If the
program records a history of its own, it is left alone and no trace is taken.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch

from gpuprobe.model.memory import TraceAction
from gpuprobe.model.session import BlindSpot
from gpuprobe.model.trace import EventColumns, MemoryTrace
from gpuprobe.sampler.tensors import Known

__all__ = ["BLIND_SPOTS", "FOREIGN_HISTORY", "CudaTrace", "layout_now"]

MAX_ENTRIES = 1_000_000
"""Events kept for one step. torch's ring buffer holds some 100 bytes each, plus stacks."""

BLIND_SPOTS = (
    BlindSpot(
        "device memory taken outside torch's caching allocator (NCCL, CUDA context, libraries)",
        "it is not in 'allocated' and 'reserved'; the driver's 'used' is larger by it",
    ),
)

FOREIGN_HISTORY = BlindSpot(
    "the allocator's history: the program records its own",
    "no trace was taken, so that the program's stays as it is; counters are complete",
)

Convert = Callable[[dict[str, Any], int], MemoryTrace]


class CudaTrace:
    """Takes one trace per device and step. ``convert`` turns a snapshot dictionary (as
    ``torch.cuda.memory._snapshot`` returns it) and a device index into a `MemoryTrace`.
    """

    def __init__(self, convert: Convert) -> None:
        self._convert = convert
        self._on = False

    def begin(self) -> bool:
        """Start the history of a step. False where the program records its own."""
        if not torch.cuda.is_initialized():
            return True
        if not self._on and torch._C._cuda_isHistoryEnabled():
            return False
        record = torch.cuda.memory._record_memory_history
        options: dict[str, Any] = {"stacks": "python", "max_entries": MAX_ENTRIES}
        if "clear_history" in inspect.signature(record).parameters:  # since torch 2.7
            options["clear_history"] = True
        record("all", **options)
        self._on = True
        return True

    def collect(self, step: int, known: Iterable[Known]) -> list[MemoryTrace]:
        """The traces of the step that ends now."""
        if not self._on:
            return []
        traces = layout_now(self._convert, step, known)
        self.stop()
        return traces

    def stop(self) -> None:
        """Switch the history off, if it is ours."""
        if self._on:
            torch.cuda.memory._record_memory_history(None)
            self._on = False


def layout_now(convert: Convert, step: int, known: Iterable[Known]) -> list[MemoryTrace]:
    """Every device's segments as they are now, with whatever history there is."""
    if not torch.cuda.is_initialized():
        return []
    snapshot = torch.cuda.memory._snapshot()
    found = {(item.device, item.address): item for item in known}
    used = {segment["device"] for segment in snapshot["segments"]}
    traces = []
    for index, events in enumerate(snapshot["device_traces"]):
        if events or index in used:
            trace = convert(snapshot, index)
            trace.step = step
            _categorise(trace, found)
            traces.append(trace)
    return traces


def _categorise(trace: MemoryTrace, known: dict[tuple[str, int], Known]) -> None:
    """Give the blocks that still live at the end of the trace what a walk found them to be.

    An address may have had several owners: the walk speaks of the last one.
    """
    for rows in (trace.baseline, trace.events):
        for column in (rows.category, rows.module):
            column.extend([0] * (len(rows) - len(column)))
    alloc = TraceAction.ALLOC.code
    last: dict[int, tuple[EventColumns, int]] = {
        address: (trace.baseline, i) for i, address in enumerate(trace.baseline.address)
    }
    events = trace.events
    for i, (action, address) in enumerate(zip(events.action, events.address, strict=True)):
        if action == alloc:
            last[address] = (events, i)
    for (device, address), item in known.items():
        if device == trace.device and address in last:
            rows, i = last[address]
            rows.category[i] = item.category.code
            rows.module[i] = trace.stacks.string(item.module)
