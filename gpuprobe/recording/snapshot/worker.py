"""Reading a snapshot in a process of its own.

Why: a snapshot is a pickle from elsewhere. Even where no name is looked up, a few bytes can
crash the interpreter or make it ask for all memory (see `snapshot_pickle`). Here the damage is
limited to a child process with a limit on memory and on processor time. It also is the
cheaper way: the child never frees the millions of dictionaries it read, it just ends, and the
parent never holds them.

The child gets the file as its standard input and answers on its standard output, a record at
a time, so that columns leave it as they are made::

    magic   8 bytes  "GPSNAP1\\n"
    record  <IHHQ    length of the name, device, 0, count; then the name, then
                     the next part of that device's column: count items, machine byte order
    …
    record           the name "json": count bytes of JSON, the last record:
                     {"error": …, "hint": …} or {"traces": […], "foreign": {…}}

The bytes never leave the machine and both ends are the same installation, so there is no
version. They are checked all the same: the child has read a hostile file.
"""

from __future__ import annotations

import gc
import json
import os
import struct
import subprocess
import sys
import threading
from array import array
from functools import partial
from typing import IO, Any

from gpuprobe.analysis.trace.lifetimes import Lifetimes
from gpuprobe.errors import DataError, InternalError, SnapshotError
from gpuprobe.model.io.codec import from_plain, to_plain
from gpuprobe.model.io.gc_pause import gc_paused
from gpuprobe.model.memory import Block, BlockState, Segment, TraceAction
from gpuprobe.model.trace import (
    COLUMNS,
    AllocatorSettings,
    Annotation,
    EventColumns,
    Frame,
    MemoryTrace,
    StackTable,
)
from gpuprobe.recording.snapshot.child import limit_process, start
from gpuprobe.recording.snapshot.decode import Decoded, Keep, add_baseline, decode
from gpuprobe.recording.snapshot.pickles import load_plain

_MAGIC = b"GPSNAP1\n"
_RECORD = struct.Struct("<IHHQ")
_INDICES = frozenset(("action", "stack", "module", "phase", "pool"))
_BUFFER = 1 << 16
"""Bytes. The unpickler gets a copy of them at a time, for which more would be mapped anew each time
(from 128 KiB on), and come page by page."""
_SMALLEST_ENTRY = 8
"""No event or block takes fewer bytes in a pickle, so a file bounds how many there are."""


def decode_stream(stream: IO[bytes], size: int, keep: Keep | None = None) -> Decoded:
    """Read and decode in this process; ``keep`` as for `decode`. Raises SnapshotError."""
    with gc_paused():
        plain = load_plain(stream, size)
        found = decode(plain, limit=size // _SMALLEST_ENTRY + 1024, keep=keep, size=size)
        if keep is not None:
            # The child ends without freeing what it read.
            _UNFREED.append(plain)
        return found


_UNFREED: list[Any] = []


def read_in_child(stream: IO[bytes], size: int) -> Decoded:
    """Read and decode in a child process. ``stream`` is a real file at its start.

    Raises what `answer_of` raises, and InternalError where the child could not be run.
    """
    if not sys.executable:  # an embedded interpreter: there is no program to start
        return decode_stream(stream, size)
    return answer_of(start(stream, size))


def answer_of(child: subprocess.Popen[bytes]) -> Decoded:
    """What a child has read that `start` started.

    Raises SnapshotError for whatever is wrong with the file, also where the child was ended
    by it; InternalError where the child failed.
    """
    assert child.stdout is not None
    assert child.stderr is not None
    with child.stdout, child.stderr:
        try:
            with gc_paused():
                answer = receive(child.stdout)
        except EOFError:
            talk = child.stderr.read(10_000).decode("utf-8", "replace").strip()
            raise _ended(child.wait(), talk) from None
        except BaseException:
            child.kill()
            child.wait()
            raise
    # It has said all it had to. Giving back the memory of a large snapshot takes the system a
    # tenth of a second, which nobody has to wait for.
    threading.Thread(target=child.wait, name="gpuprobe-reaper", daemon=True).start()
    if isinstance(answer, SnapshotError):
        raise answer
    return answer


def _ended(code: int, talk: str) -> SnapshotError | InternalError:
    """What to say of a child that ended before it had answered."""
    if code < 0 or "MemoryError" in talk:
        return SnapshotError(
            "reading the file crashed or exceeded its limits: torch did not write it",
            hint="do not unpickle this file",
        )
    last = talk.splitlines()[-1] if talk else f"exit code {code}"
    return InternalError(f"the process that reads snapshots failed: {last}")


def main(size: int) -> None:
    """The child."""
    limit_process(size)
    gc.disable()  # to its end: one collection of what a large snapshot holds takes a second
    output = sys.stdout.buffer
    try:
        output.write(_MAGIC)
        keep = partial(_send_column, output)
        try:
            with open(0, "rb", buffering=_BUFFER, closefd=False) as stream:
                send(decode_stream(stream, size, keep), output)
        except SnapshotError as error:
            _send_json({"error": str(error), "hint": error.hint}, output)
        output.flush()
        os.close(output.fileno())  # the parent need not wait for the memory to be given back
    except BrokenPipeError:  # the parent lost interest
        pass
    # Not sys.exit: that would free everything, object by object.
    os._exit(0)


def _send_column(stream: IO[bytes], device: int, name: str, values: array[int]) -> None:
    _record(stream, name, device, len(values))
    stream.write(values)


def _record(stream: IO[bytes], name: str, device: int, count: int) -> None:
    stream.write(_RECORD.pack(len(name), device, 0, count) + name.encode())


def _send_json(plain: dict[str, Any], stream: IO[bytes]) -> None:
    raw = json.dumps(plain, separators=(",", ":")).encode()
    _record(stream, "json", 0, len(raw))
    stream.write(raw)


def send(answer: Decoded, stream: IO[bytes]) -> None:
    """Write the last record: all but the columns of events, which have been sent before."""
    traces = [
        {
            "device": trace.device,
            "complete": trace.complete,
            "pools": trace.pools,
            "settings": to_plain(trace.settings),
            "annotations": trace.annotations,
            "strings": trace.stacks.strings,
            "frames": trace.stacks.frames,
            "stacks": trace.stacks.stacks,
            "segments": [_plain_segment(segment) for segment in trace.segments],
        }
        for trace in answer.traces
    ]
    _send_json({"traces": traces, "foreign": answer.foreign, "odd": answer.odd}, stream)


def _plain_segment(segment: Segment) -> list[Any]:
    """Without field names: a snapshot can have a hundred thousand blocks."""
    return [
        segment.device,
        segment.address,
        segment.total_size,
        segment.stream,
        segment.segment_type,
        segment.pool_id,
        segment.is_expandable,
        segment.stack,
        [(b.address, b.size, b.requested_size, b.state.value, b.stack) for b in segment.blocks],
    ]


def receive(stream: IO[bytes]) -> Decoded | SnapshotError:
    """Read what the child wrote. Raises EOFError where it ends early, InternalError for
    anything that it does not write.
    """
    arrived: dict[str, _Arrived] = {}
    try:
        if _exactly(stream, len(_MAGIC)) != _MAGIC:
            raise ValueError("it has no valid start")
        while True:
            length, device, _, count = _RECORD.unpack(_exactly(stream, _RECORD.size))
            name = _exactly(stream, length).decode()
            if name == "json":
                break
            arrived.setdefault(f"cuda:{device}", _Arrived()).take(name, stream, count)
        plain = json.loads(_exactly(stream, count))
        if stream.read(1):
            raise ValueError("it has no valid end")
        if "error" in plain:
            return SnapshotError(str(plain["error"]), hint=str(plain["hint"]))
        traces = [
            _trace(entry, arrived.get(entry["device"], _Arrived())) for entry in plain["traces"]
        ]
        return Decoded(traces, _counts(plain["foreign"]), _counts(plain["odd"]))
    except (KeyError, TypeError, ValueError, IndexError, OverflowError, DataError) as error:
        raise InternalError(
            f"the process that reads snapshots returned invalid data: {error}"
        ) from error


class _Arrived:
    """The columns of a trace, as far as they have come."""

    def __init__(self) -> None:
        self.events = EventColumns()
        self.most: dict[str, int] = {}  # of the columns that are indices of something
        self.ends = Lifetimes(self.events)

    def take(self, name: str, stream: IO[bytes], count: int) -> None:
        """Read the next part of a column. Raises KeyError for one that is none, ValueError for
        one that is not as long as it must be.
        """
        values = array(COLUMNS[name])
        values.fromfile(stream, count)
        getattr(self.events, name).extend(values)
        if name in _INDICES and values:
            self.most[name] = max(self.most.get(name, 0), max(values))
        if name == "size":  # the last of the columns that tell when blocks end
            rows = len(self.events)
            if not rows == len(self.events.address) == len(self.events.size):
                raise ValueError("columns of several lengths")
            self.ends.extend()


def _counts(plain: dict[str, Any]) -> dict[str, int]:
    return {str(name): int(count) for name, count in plain.items()}


def _exactly(stream: IO[bytes], count: int) -> bytes:
    data = stream.read(count)
    if len(data) != count:
        raise EOFError
    return data


def _trace(plain: dict[str, Any], arrived: _Arrived) -> MemoryTrace:
    stacks = StackTable.of(
        plain["strings"],
        [Frame(file, line, name) for file, line, name in plain["frames"]],
        [tuple(stack) for stack in plain["stacks"]],
    )
    if any(index >= len(stacks.frames) for stack in stacks.stacks for index in stack):
        raise ValueError("a stack's frame")
    trace = MemoryTrace(
        device=plain["device"],
        events=arrived.events,
        lifetimes=arrived.ends,
        stacks=stacks,
        pools=[(low, high) for low, high in plain["pools"]],
        segments=tuple(_segment(entry) for entry in plain["segments"]),
        settings=None
        if plain["settings"] is None
        else from_plain(AllocatorSettings, plain["settings"]),
        complete=plain["complete"],
        annotations=tuple(Annotation(*entry) for entry in plain["annotations"]),
    )
    limits = {
        "action": len(TraceAction),
        "stack": len(stacks.stacks),
        "module": len(stacks.strings),
        "phase": len(stacks.strings),
        "pool": len(trace.pools),
    }
    rows = len(trace.events)
    for name in COLUMNS:
        if len(getattr(trace.events, name)) not in (0, rows) or (
            arrived.most.get(name, -1) >= limits.get(name, 1 << 64)
        ):
            raise ValueError(f"column {name}")
    add_baseline(trace)
    return trace


def _segment(plain: list[Any]) -> Segment:
    device, address, total, stream, kind, (low, high), expandable, stack, blocks = plain
    states = {state.value: state for state in BlockState}
    return Segment(
        device=device,
        address=address,
        total_size=total,
        stream=stream,
        segment_type=kind,
        pool_id=(low, high),
        is_expandable=expandable,
        blocks=tuple(Block(at, size, asked, states[s], st) for at, size, asked, s, st in blocks),
        stack=stack,
    )
