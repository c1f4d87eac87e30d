"""A trace as torch's own memory snapshot, for torch's viewer and ``torch.cuda._memory_viz``.

Categories are omitted, as torch's format has none. Phases and modules are written to
``user_metadata`` and read from it again; memory that was live before the trace follows from the
frees and the final segments, as in torch's snapshots.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Sequence
from typing import IO

from gpuprobe.errors import DataError, UsageError
from gpuprobe.model.actions import OOM
from gpuprobe.model.memory import Block, Segment, TraceAction
from gpuprobe.model.text import shortened
from gpuprobe.model.trace import AllocatorSettings, MemoryTrace, StackTable, phase_tag

_DIGITS = 4  # of a device's index: more GPUs than any machine has


def to_snapshot(traces: Iterable[MemoryTrace]) -> dict[str, object]:
    """The dictionary that ``torch.cuda.memory._snapshot()`` would have returned.

    Several traces of one device (one per step) are joined in the order given, with the layout of
    the last. Raises UsageError without a trace of a CUDA device, DataError for an impossible device
    number.
    """
    device_traces: list[list[dict[str, object]]] = []
    segments: dict[int, list[dict[str, object]]] = {}
    annotations: list[dict[str, object]] = []
    settings: dict[str, object] = {}
    for trace in traces:
        kind, _, number = trace.device.partition(":")
        if kind != "cuda":
            continue
        device = _index(number)
        while len(device_traces) <= device:
            device_traces.append([])
        frames = _FrameLists(trace.stacks)
        device_traces[device].extend(_events(trace, frames))
        segments[device] = [_segment(segment, frames) for segment in trace.segments]
        annotations += [
            {"stage": note.stage, "name": note.name, "device": device, "time_us": note.time_us}
            for note in trace.annotations
        ]
        if trace.settings is not None:
            settings = _settings(trace.settings)
    if not device_traces:
        raise UsageError(
            "it has no memory trace of a CUDA device to export",
            hint="record with --level trace on a GPU",
        )
    return {
        "segments": [segment for device in sorted(segments) for segment in segments[device]],
        "device_traces": device_traces,
        "allocator_settings": settings,
        "external_annotations": annotations,
    }


def _index(number: str) -> int:
    """The index in a device's name. A snapshot has a list for each device up to the last."""
    if not number:
        return 0
    if not (number.isascii() and number.isdecimal() and len(number) <= _DIGITS):
        raise DataError(f"a snapshot has no device cuda:{shortened(number)}")
    return int(number)


def write(traces: Iterable[MemoryTrace], stream: IO[bytes]) -> None:
    """Pickle `to_snapshot` to a stream, in the protocol of torch's viewer."""
    pickle.dump(to_snapshot(traces), stream, protocol=4)


class _FrameLists:
    """One list per stack and one dictionary per frame, shared as torch shares them."""

    def __init__(self, stacks: StackTable) -> None:
        self._dicts = [
            {"filename": frame.filename, "line": frame.line, "name": frame.name}
            for frame in stacks.frames
        ]
        self._stacks = stacks.stacks
        self._lists: dict[int, list[dict[str, object]]] = {}

    def __getitem__(self, stack: int) -> list[dict[str, object]]:
        found = self._lists.get(stack)
        if found is None:
            found = self._lists[stack] = [self._dicts[i] for i in self._stacks[stack]]
        return found


def _events(trace: MemoryTrace, frames: _FrameLists) -> Iterable[dict[str, object]]:
    events, strings = trace.events, trace.stacks.strings
    names = [action.value for action in TraceAction]
    tags: dict[tuple[int, int], str] = {}
    columns: tuple[Sequence[int], ...] = tuple(
        events.column(name)
        for name in (
            "action", "address", "size", "stream", "time_us", "stack", "module", "phase",
            "pool", "device_free",
        )
    )  # fmt: skip
    for action, address, size, stream, time, stack, module, phase, pool, free in zip(
        *columns, strict=True
    ):
        tag = tags.get((phase, module))
        if tag is None:
            text = strings[phase]
            tag = phase_tag(text, strings[module]) if module else text
            tags[phase, module] = tag
        where = {"device_free": free} if action == OOM else {"addr": address}
        yield {
            "action": names[action],
            **where,
            "size": size,
            "stream": stream,
            "time_us": time,
            "compile_context": "N/A",
            "user_metadata": tag,
            "pool_id": trace.pools[pool],
            "frames": frames[stack],
        }


def _segment(segment: Segment, frames: _FrameLists) -> dict[str, object]:
    return {
        "device": segment.device,
        "address": segment.address,
        "total_size": segment.total_size,
        "allocated_size": segment.allocated_size,
        "active_size": segment.allocated_size + segment.pending_size,
        "requested_size": sum(block.requested_size for block in segment.blocks),
        "stream": segment.stream,
        "segment_type": segment.segment_type,
        "segment_pool_id": segment.pool_id,
        "is_expandable": segment.is_expandable,
        "frames": frames[segment.stack],
        "blocks": [_block(block, frames) for block in segment.blocks],
    }


def _block(block: Block, frames: _FrameLists) -> dict[str, object]:
    return {
        "address": block.address,
        "size": block.size,
        "requested_size": block.requested_size,
        "state": block.state.value,
        "frames": frames[block.stack],
    }


def _settings(settings: AllocatorSettings) -> dict[str, object]:
    return {
        "PYTORCH_CUDA_ALLOC_CONF": settings.conf,
        "max_split_size": settings.max_split_size,
        "garbage_collection_threshold": settings.garbage_collection_threshold,
        "expandable_segments": settings.expandable_segments,
        "roundup_power2_divisions": {
            str(size): parts for size, parts in settings.roundup_power2_divisions.items()
        },
        **settings.extra,
    }
