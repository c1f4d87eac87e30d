"""Trace chunks: one `MemoryTrace` as compressed columns in a file.

::

    magic          8 bytes   89 "GPTRC" 0D 0A (the first byte is not ASCII, so text is never
                             mistaken for a chunk, and rewritten line ends are detected)
    version        2 × u16   major, minor
    header length  u32       bytes
    header crc32   u32
    header         JSON      see `_header`
    blobs                    zlib streams, in the order that the header lists them

All integers are little-endian. The header gives every blob's typecode, number of rows, stored
length and the crc32 of its stored bytes. A column that is zero in every row is left out.
A reader skips columns that it does not know, and rejects a newer major version.
"""

from __future__ import annotations

import json
import struct
import sys
import zlib
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, compress
from pathlib import Path
from typing import Annotated, Any
from weakref import WeakValueDictionary

from gpuprobe.errors import DataError, UnsupportedSchema
from gpuprobe.model.io.budget import ChunkBudget, amounts, refuse_bomb
from gpuprobe.model.io.codec import from_plain, to_plain
from gpuprobe.model.memory import Block, Category, Segment, TraceAction
from gpuprobe.model.record import record
from gpuprobe.model.run.columns import traced_steps
from gpuprobe.model.run.session import HeldRows, LaterUses, SessionEnd, Step
from gpuprobe.model.text import shortened
from gpuprobe.model.trace import (
    COLUMNS,
    AllocatorSettings,
    Annotation,
    EventColumns,
    Frame,
    LiveColumns,
    MemoryTrace,
    StackTable,
    UsedLater,
    known_line,
    with_most_depth,
)
from gpuprobe.model.values import Address, Bounds, Count, NewestMicroseconds
from gpuprobe.recording.files import CHUNK_NAME

CHUNK_VERSION = (1, 2)
"""(major, minor). History: 1.0: first version. 1.1: the columns of uses. 1.2: ``grad``, the names
of operators, and what they did with the values."""

_MAGIC = b"\x89GPTRC\r\n"
_PREFIX = struct.Struct("<8sHHII")

# zlib cannot expand further than this (zlib's technical notes: 1032:1). A header that claims
# more is lying, and is refused before anything of that size is allocated.
_MAX_EXPANSION = 1032

_UNPACKED_FREE = 128 << 20
_UNPACKED_PER_BYTE = 256
"""Bytes that one chunk may unpack to, and how many more for each byte of the chunk; recorded ones
unpack to 10 times their size. `gpuprobe.model.io.budget` limits what the bytes may describe."""

# Level 1: half the size of level 0 in a fifth of the time of level 6, and it is spent between
# two training steps.
_LEVEL = 1

_TYPECODES = frozenset("bBhHiIqQfd")
"""Type codes with the same size on all platforms. An unknown column is skipped by its size."""


def encode_chunk(trace: MemoryTrace, *, level: int = _LEVEL) -> bytes:
    """The bytes of a chunk file. ``level`` is zlib's: 0 where the file is compressed whole."""
    blobs: list[bytes] = []
    columns = []
    for table, rows in (("events", trace.events), ("baseline", trace.baseline)):
        for name, typecode in COLUMNS.items():
            values: array[int] = getattr(rows, name)
            raw = _little_endian(values)
            if raw.count(0) == len(raw):
                continue
            columns.append(
                {
                    "table": table,
                    "name": name,
                    "typecode": typecode,
                    "rows": len(values),
                    **_pack(raw, blobs, level),
                }
            )
    texts = {
        "strings": trace.stacks.strings,
        "frames": [list(frame) for frame in trace.stacks.frames],
        "stacks": [list(stack) for stack in trace.stacks.stacks],
        "annotations": [list(annotation) for annotation in trace.annotations],
    }
    raw = _dumps(texts)[:-1] + f',"segments":[{_layout(trace.segments)}]}}'.encode()
    header = _dumps(
        {
            "device": trace.device,
            "step": trace.step,
            "complete": trace.complete,
            "rows": {"events": len(trace.events), "baseline": len(trace.baseline)},
            "pools": [list(pool) for pool in trace.pools],
            "settings": to_plain(trace.settings),
            "columns": columns,
            "tables": {"length": len(raw), **_pack(raw, blobs, level)},
        }
    )
    prefix = _PREFIX.pack(_MAGIC, *CHUNK_VERSION, len(header), zlib.crc32(header))
    return b"".join((prefix, header, *blobs))


def _layout(segments: Iterable[Segment]) -> str:
    """The items of ``to_plain(segments)`` as JSON. Thousands of blocks are written between two
    steps of training, and dictionaries of them take five times as long.
    """
    texts = []
    for one in segments:
        rest = f',"blocks":[{",".join(map(_block, one.blocks))}]' if one.blocks else ""
        rest += f',"stack":{one.stack}' if one.stack else ""
        if one.is_expandable:
            rest = f',"is_expandable":true{rest}'
        if one.pool_id != (0, 0):
            first, second = one.pool_id
            rest = f',"pool_id":[{first},{second}]{rest}'
        kind = json.dumps(one.segment_type)
        texts.append(
            f'{{"device":{one.device},"address":{one.address},"total_size":{one.total_size},'
            f'"stream":{one.stream},"segment_type":{kind}{rest}}}'
        )
    return ",".join(texts)


def _block(block: Block) -> str:
    stack = f',"stack":{block.stack}' if block.stack else ""
    return (
        f'{{"address":{block.address},"size":{block.size},'
        f'"requested_size":{block.requested_size},"state":"{block.state._value_}"{stack}}}'
    )


def _dumps(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def _pack(raw: bytes, blobs: list[bytes], level: int) -> dict[str, int]:
    blob = zlib.compress(raw, level)
    blobs.append(blob)
    return {"stored": len(blob), "crc32": zlib.crc32(blob)}


def _little_endian(values: array[int]) -> bytes:
    if sys.byteorder == "big":  # pragma: no cover
        values = values[:]
        values.byteswap()
    return values.tobytes()


def decode_chunk(data: bytes, name: str) -> MemoryTrace:
    """Read what `encode_chunk` made. ``name`` is the file's, for messages.

    Raises UnsupportedSchema for a newer major version, DataError for anything that is not a
    whole and consistent chunk. Allocates at most 128 MiB and 256 times ``len(data)``.
    """
    if len(data) < _PREFIX.size:
        raise DataError(f"{name}: the trace chunk is truncated")
    magic, major, minor, length, crc = _PREFIX.unpack_from(data)
    if magic != _MAGIC:
        raise DataError(f"{name}: not a trace chunk")
    if major > CHUNK_VERSION[0]:
        raise UnsupportedSchema(
            f"{name}: trace format {major}.{minor} is newer than this gpuprobe can read",
            hint="upgrade gpuprobe: pip install -U gpuprobe",
        )
    raw_header = data[_PREFIX.size : _PREFIX.size + length]
    if len(raw_header) != length:
        raise DataError(f"{name}: the trace chunk is truncated")
    if zlib.crc32(raw_header) != crc:
        raise DataError(f"{name}: the trace chunk is damaged (header)")
    try:
        header = from_plain(_Header, json.loads(raw_header), "its header")
        return _decode(header, memoryview(data)[_PREFIX.size + length :])
    except (DataError, ValueError, RecursionError) as error:
        raise DataError(f"{name}: the trace chunk is damaged ({error})") from error


_Count = Annotated[int, Bounds(0, (1 << 63) - 1)]


@record(frozen=True)
class _Blob:
    stored: _Count
    crc32: _Count


@record(frozen=True)
class _StoredColumn(_Blob):
    table: str
    name: str
    typecode: str
    rows: _Count


@record(frozen=True)
class _Tables(_Blob):
    length: _Count


@record(frozen=True)
class _RowCounts:
    events: _Count
    baseline: _Count


@record(frozen=True)
class _Header:
    device: str
    step: Count | None
    complete: bool
    rows: _RowCounts
    pools: list[tuple[Address, Address]]
    settings: AllocatorSettings | None
    columns: list[_StoredColumn]
    tables: _Tables


@record(frozen=True)
class _Texts:
    strings: list[str]
    frames: list[Frame]
    stacks: list[list[Any]]
    segments: tuple[Segment, ...]
    annotations: tuple[Annotation, ...] = ()


class _Blobs:
    """The compressed blobs of a chunk's body, read one after the other."""

    def __init__(self, body: memoryview) -> None:
        self._body = body
        self._position = 0
        self._allowance = _UNPACKED_FREE + _UNPACKED_PER_BYTE * len(body)

    @property
    def at_end(self) -> bool:
        return self._position == len(self._body)

    def skip(self, entry: _Blob) -> memoryview:
        """The next blob as it is stored. Raises DataError if it is truncated or damaged."""
        blob = self._body[self._position : self._position + entry.stored]
        if len(blob) != entry.stored:
            raise DataError("truncated")
        if zlib.crc32(blob) != entry.crc32:
            raise DataError("checksum")
        self._position += entry.stored
        return blob

    def unpack(self, entry: _Blob, length: int) -> bytes:
        """The next blob, decompressed. Raises DataError unless it has ``length`` bytes, or if the
        blobs of this chunk unpack to far more than a file of its size can hold.
        """
        blob = self.skip(entry)
        if length > entry.stored * _MAX_EXPANSION:
            raise DataError("a length that compression cannot have reached")
        self._allowance -= length
        if self._allowance < 0:
            raise DataError("it unpacks to far more than a file of its size can hold")
        unpacker = zlib.decompressobj()
        try:
            raw = unpacker.decompress(blob, length + 1)
        except zlib.error as error:
            raise DataError(str(error)) from error
        if len(raw) != length or not unpacker.eof or unpacker.unused_data:
            raise DataError("a blob whose length differs from the header")
        return raw


def _decode(header: _Header, body: memoryview) -> MemoryTrace:
    blobs = _Blobs(body)
    trace = MemoryTrace(
        device=header.device,
        events=EventColumns(),
        baseline=LiveColumns(),
        pools=header.pools,
        settings=header.settings,
        complete=header.complete,
        step=header.step,
    )
    budget = ChunkBudget()
    budget.spend({"events": header.rows.events + header.rows.baseline}, len(body))
    _decode_columns(header, blobs, trace)
    for table, rows in _tables_of(trace, header).values():
        _restore(table, rows, len(body))
    tables_json = blobs.unpack(header.tables, header.tables.length)
    refuse_bomb(tables_json, len(body))
    texts = from_plain(_Texts, json.loads(tables_json), "its tables")
    if not blobs.at_end:
        raise DataError("bytes after its end")
    trace.stacks = _stack_table(texts)
    trace.segments = texts.segments
    trace.annotations = texts.annotations
    counts = amounts(trace)
    del counts["events"]  # they were checked before they were unpacked
    budget.spend(counts, 0)
    trace.stacks = with_most_depth(trace.stacks)
    _check_indices(trace)
    return trace


def _tables_of(trace: MemoryTrace, header: _Header) -> dict[str, tuple[EventColumns, int]]:
    """The tables of a chunk by name, each with its number of rows."""
    return {
        "events": (trace.events, header.rows.events),
        "baseline": (trace.baseline, header.rows.baseline),
    }


def _decode_columns(header: _Header, blobs: _Blobs, trace: MemoryTrace) -> None:
    tables = _tables_of(trace, header)
    decoded: set[tuple[str, str]] = set()
    for column in header.columns:
        if column.typecode not in _TYPECODES:
            raise DataError(f"column {column.name}")
        if column.table not in tables or column.name not in COLUMNS:
            blobs.skip(column)  # written by a newer minor version
            continue
        if (column.table, column.name) in decoded:
            raise DataError(f"column {column.name} twice")
        decoded.add((column.table, column.name))
        values = array(column.typecode)
        raw = blobs.unpack(column, column.rows * values.itemsize)
        table, rows = tables[column.table]
        if column.typecode != COLUMNS[column.name] or column.rows != rows:
            raise DataError(f"column {column.name}")
        values.frombytes(raw)
        if sys.byteorder == "big":  # pragma: no cover
            values.byteswap()
        setattr(table, column.name, values)


_REQUIRED = ("action", "address", "size")
"""The columns that `EventColumns` promises: any other may be empty, which means zero."""


def _restore(columns: EventColumns, rows: int, budget: int) -> None:
    """Fill in the columns that every table has, where they were left out for being all zero.

    ``address`` is left out where every event is a failure: of a step that did nothing but run
    out of memory. A row always has some column of 8 bytes that is not zero (an address or a
    size), so what is filled in is bounded by the file as the columns are.
    """
    for name in _REQUIRED:
        values: array[int] = getattr(columns, name)
        if len(values) == rows:
            continue
        if rows * values.itemsize > budget * _MAX_EXPANSION:
            raise DataError("a length that compression cannot have reached")
        setattr(columns, name, array(values.typecode, bytes(rows * values.itemsize)))


def _stack_table(texts: _Texts) -> StackTable:
    frames = [
        frame
        if 0 <= frame.line < 1 << 31
        else Frame(frame.filename, known_line(frame.line) or 0, frame.name)
        for frame in texts.frames
    ]
    stacks = [tuple(stack) for stack in texts.stacks]
    if texts.strings[:1] != [""] or frames[:1] != [Frame("", 0, "")] or stacks[:1] != [()]:
        raise DataError("tables")
    for index in chain.from_iterable(stacks):
        if type(index) is not int or not 0 <= index < len(frames):
            raise DataError("stacks")
    return StackTable.of([shortened(text) for text in texts.strings], frames, stacks)


def all_below(values: array[int], limit: int) -> bool:
    """Whether all values of a column are below a limit. Those of four bytes are compared byte by
    byte, the highest first: a million of them without an object for each.
    """
    if values.typecode != "I" or sys.byteorder == "big" or limit < 1:
        return not values or max(values) < limit
    raw = values.tobytes()
    equal: list[bytes] = []  # 1 for values whose higher bytes equal those of the highest value
    for place in (3, 2, 1, 0):
        plane, digit = raw[place::4], (limit - 1) >> 8 * place & 255
        for chosen in equal:
            plane = bytes(compress(plane, chosen))
        compared = plane.translate(bytes(digit) + b"\1" + b"\2" * (255 - digit))
        if b"\2" in compared:
            return False
        if b"\1" not in compared:
            return True
        if b"\0" in compared:
            equal.append(compared)
    return True


def _check_indices(trace: MemoryTrace) -> None:
    """Every index points into its table, so that no analysis has to check again."""
    limits: dict[str, int] = {
        "action": len(TraceAction),
        "stack": len(trace.stacks.stacks),
        "module": len(trace.stacks.strings),
        "phase": len(trace.stacks.strings),
        "last_stack": len(trace.stacks.stacks),
        "last_name": len(trace.stacks.strings),
        "made_name": len(trace.stacks.strings),
        "first_name": len(trace.stacks.strings),
        "last_phase": len(trace.stacks.strings),
        "made_phase": len(trace.stacks.strings),
        "pool": len(trace.pools),
    }
    if not trace.pools:  # a column that was left out has the index 0
        raise DataError("pools")
    stacks = len(trace.stacks.stacks)
    for segment in trace.segments:
        if segment.stack >= stacks or any(block.stack >= stacks for block in segment.blocks):
            raise DataError("segments")
    categories = len(Category)
    for columns in (trace.events, trace.baseline):
        for name, limit in limits.items():
            values: array[int] = getattr(columns, name)
            if not all_below(values, limit):
                raise DataError(f"column {name}")
        times = columns.time_us
        if times and not 0 <= min(times) <= max(times) <= NewestMicroseconds:
            raise DataError("column time_us")
        if columns.category and max(columns.category) >= categories:
            # A category that a newer minor version added: unknown to this one.
            known = bytes(code if code < categories else 0 for code in range(256))
            columns.category = array("B", columns.category.tobytes().translate(known))


class Chunks:
    """The trace chunks of a recording, and how much they unpack to, all together.

    Thousands of small files could each unpack to a million events, which each chunk alone may.
    """

    def __init__(self, path: Path, read: Callable[[str], bytes]) -> None:
        """``read`` returns the bytes of a chunk by its name, and raises OSError."""
        self._path = path
        self._read = read
        self._read_before: set[str] = set()
        self._budget = ChunkBudget()
        self._refused: str | None = None

    def load(self, name: str) -> MemoryTrace:
        """Read one chunk. Raises DataError, naming it."""
        # The name comes from the stream: it must not lead out of the directory.
        if not CHUNK_NAME.fullmatch(name):
            raise DataError(f"not the name of a trace chunk: {name!r:.80}")
        if self._refused is not None:
            raise DataError(self._refused)
        try:
            data = self._read(name)
        except OSError as error:
            raise DataError(
                f"{name}: the trace chunk cannot be read: {error.strerror or error}"
            ) from error
        trace = decode_chunk(data, name)
        if name not in self._read_before:
            self._read_before.add(name)
            try:
                self._budget.spend(amounts(trace), len(data))
            except DataError as error:
                # No chunk is unpacked after this one: readers continue with the next step.
                self._refused = f"{name}: the trace chunks of {self._path} unpack to {error}"
                raise DataError(self._refused) from error
        return trace


class RankTraces:
    """The traces of a rank, in the order of their steps, with what later steps used of their blocks
    and what held these.
    """

    def __init__(
        self,
        load: Callable[[str], MemoryTrace],
        steps: Sequence[Step],
        later_uses: Mapping[str, Sequence[LaterUses]],
        held: Mapping[str, Sequence[HeldRows]],
        end: SessionEnd | None,
    ) -> None:
        """``load`` reads a chunk by its name; ``later_uses`` and ``held`` are by that name, too."""
        self._load = load
        self._steps = steps
        self._in_use: WeakValueDictionary[str, MemoryTrace] = WeakValueDictionary()
        self.unreadable: dict[int, str] = {}
        self._later_uses = later_uses
        self._held = held
        self._end = end

    def load(self, name: str) -> MemoryTrace:
        """The trace of one chunk. Raises DataError."""
        trace = self._load(name)
        if trace.events.operator:
            trace.used_later = self._used_later(name, trace.step)
            trace.held = tuple(
                (one.holder, one.events, one.baseline) for one in self._held.get(name, ())
            )
        return trace

    def __iter__(self) -> Iterator[MemoryTrace]:
        return (self.load(name) for step in traced_steps(self._steps) for name in step.traces)

    def of(self, step: Step) -> Iterator[MemoryTrace]:
        """The traces of one step, read now; one that is still in use is not read again."""
        for name in step.traces:
            trace = self._in_use.get(name)
            if trace is None:
                try:
                    trace = self._in_use[name] = self.load(name)
                except DataError as error:
                    self.unreadable[step.index] = str(error)
                    raise
            yield trace

    def steps(self, steps: Sequence[Step]) -> list[Step]:
        """Those that name traces; of a large recording no others are decoded."""
        return traced_steps(steps)

    def _used_later(self, name: str, step: int | None) -> UsedLater | None:
        """What later steps used of the blocks of a trace; None if that was not traced."""
        if step is None:
            return None
        steps = self._steps
        at = bisect_right(steps, step, key=lambda one: one.index)
        known = self._later_uses.get(name, ())
        end = self._end
        ended = end is not None and end.error is None and end.epoch is None
        return UsedLater(
            len(steps) - at,
            ended,
            ended and at == len(steps) > 0 and steps[at - 1].ended_by == "end",
            tuple(row for uses in known for row in uses.events),
            tuple(row for uses in known for row in uses.baseline),
            end is not None and end.epoch is not None and end.epoch.evaluated,
            at == len(steps) and end is not None and end.error is not None,
        )
