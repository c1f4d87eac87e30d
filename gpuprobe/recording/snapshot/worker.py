"""Reading a snapshot in a separate process.

Why: a snapshot is a pickle from elsewhere. Even if no name is resolved, a few bytes can crash the
interpreter or make it allocate all memory (`gpuprobe.recording.snapshot.pickles`). Here
the damage is limited to a child process with a limit on memory and on processor time. It also is
the cheaper way: the child never frees the millions of dictionaries it read, it just ends, and the
parent never holds them.

The child gets the file as its standard input and answers on its standard output, a record at
a time, so that columns leave it as they are made::

    magic   8 bytes  "GPSNAP1\\n"
    record  <IHHQ    length of the name, device, 0, count; then the name, then
                     the next part of that device's column: count items, machine byte order
    …
    record           the name "layout": count bytes of JSON: the segments, pools and settings of
                     a device, whose columns up to "pool" have been sent. The parent makes
                     accounts of them while the other columns are worked out here
    record           the whole of another column
    …
    record           the name "rest": count bytes of JSON, the last record:
                     {"error": …, "hint": …} or {"traces": […], "foreign": {…}}

The bytes never leave the machine and both ends are the same installation, so there is no
version. They are still checked: the child may have read a hostile file.
"""

from __future__ import annotations

import gc
import json
import os
import struct
import sys
from array import array
from dataclasses import asdict
from typing import IO, NoReturn

from gpuprobe.errors import SnapshotError
from gpuprobe.model.io.files import gc_paused
from gpuprobe.model.memory import Segment
from gpuprobe.model.trace import MemoryTrace
from gpuprobe.recording.snapshot.pickles import load_plain
from gpuprobe.torch_support.snapshots import Decoded, Keep, decode

MAGIC = b"GPSNAP1\n"
RECORD = struct.Struct("<IHHQ")
_BUFFER = 1 << 16
"""Bytes. The unpickler gets a copy of so many at a time; a larger copy (from 128 KiB on) would be
mapped again each time, page by page."""
_SMALLEST_ENTRY = 8
"""No event or block takes fewer bytes in a pickle, so a file bounds how many there are."""

MEMORY_PER_BYTE = 24
"""How many times its size a snapshot may take in memory. Measured: 4.8 for events with separate
stacks, 13 for events without stacks (nine dictionary entries from about 40 bytes)."""

MEMORY_FLOOR = 512 << 20
"""On top of that: the interpreter, its libraries and its allocator's reserve."""

SECONDS_FLOOR = 5
"""Processor seconds, plus one per 5 MB of file. Measured: 0.05 s, plus 0.05 s per 5 MB."""

MOST_SECONDS = 600
"""Processor seconds for a file of any size: some file systems do not report how much of a file is
stored. At 0.05 s per 5 MB these read 60 GB."""


def decode_stream(stream: IO[bytes], size: int, keep: Keep | None = None) -> Decoded:
    """Read and decode in this process; ``keep`` as for `decode`. Raises SnapshotError."""
    with gc_paused():
        plain = load_plain(stream, size)
        found = decode(plain, limit=size // _SMALLEST_ENTRY + 1024, keep=keep, size=size)
        if keep is not None:
            # The child ends without freeing what it read.
            _UNFREED.append(plain)
        return found


_UNFREED: list[object] = []


def read_stdin(size: int) -> NoReturn:
    """Read a snapshot, in the process for that: records on stdout."""
    limit_process(size)
    gc.disable()  # to its end: one collection of what a large snapshot holds takes a second
    output = sys.stdout.buffer
    try:
        output.write(MAGIC)
        sender = _Sender(output)
        try:
            with open(0, "rb", buffering=_BUFFER, closefd=False) as stream:
                sender.rest(decode_stream(stream, size, sender))
        except SnapshotError as error:
            sender.error(error)
        output.flush()
        os.close(output.fileno())  # the parent does not wait until the memory is released
    except BrokenPipeError:  # the parent lost interest
        pass
    # Not sys.exit: that would free everything, object by object.
    os._exit(0)


def limit_process(size: int) -> None:
    """Limits on memory and processor time of the child, for a file in which ``size`` bytes are
    stored.
    """
    try:
        import resource
    except ImportError:  # pragma: no cover - not a POSIX system
        return
    memory = MEMORY_FLOOR + MEMORY_PER_BYTE * size
    seconds = min(SECONDS_FLOOR + size // 5_000_000, MOST_SECONDS)
    for what, value in (
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, 0),  # it writes to a pipe only
    ):
        hard = resource.getrlimit(what)[1]
        if hard == resource.RLIM_INFINITY or value < hard:
            resource.setrlimit(what, (value, value))


class _Sender:
    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream

    def column(self, device: int, name: str, values: array[int]) -> None:
        self._record(name, device, len(values), values)

    def layout(self, trace: MemoryTrace) -> None:
        self._json(
            "layout",
            {
                "device": trace.device,
                "pools": trace.pools,
                "settings": None if trace.settings is None else asdict(trace.settings),
                "segments": [_plain_segment(segment) for segment in trace.segments],
            },
        )
        self._stream.flush()

    def rest(self, answer: Decoded) -> None:
        traces = [
            {
                "device": trace.device,
                "complete": trace.complete,
                "annotations": trace.annotations,
                "strings": trace.stacks.strings,
                "frames": trace.stacks.frames,
                "stacks": trace.stacks.stacks,
            }
            for trace in answer.traces
        ]
        self._json(
            "rest", {"traces": traces, "foreign": answer.foreign, "irregular": answer.irregular}
        )

    def error(self, error: SnapshotError) -> None:
        self._json("rest", {"error": str(error), "hint": error.hint})

    def _json(self, name: str, plain: dict[str, object]) -> None:
        raw = json.dumps(plain, separators=(",", ":")).encode()
        self._record(name, 0, len(raw), raw)

    def _record(self, name: str, device: int, count: int, body: bytes | array[int]) -> None:
        self._stream.write(RECORD.pack(len(name), device, 0, count) + name.encode())
        self._stream.write(body)


def _plain_segment(segment: Segment) -> list[object]:
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
