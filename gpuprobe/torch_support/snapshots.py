"""From a torch memory snapshot, as plain data, to traces in columns.

The schemas, from torch 2.0 to 2.13 (``torch/csrc/cuda/memory_snapshot.cpp`` and
``torch/csrc/cuda/Module.cpp``):

* top level: a dict with ``segments`` and ``device_traces``; later also ``allocator_settings``
  and ``external_annotations``. ``torch.cuda.memory_snapshot()`` gives the list of segments only.
* a block's stack and request: ``history[0]`` in 2.0, then ``frames`` and ``requested_size``;
  its ``address`` came in 2.1: before, blocks follow one another from the segment's.
* a trace entry gained ``time_us`` (2.2), ``compile_context``, ``user_metadata``, ``pool_id``.
* ``oom`` has ``device_free`` instead of ``addr``; events recorded without context have no
  ``frames``.

``user_metadata`` becomes the event's phase, unless it is a tag that `phase_tag` made.
``compile_context`` has no column and is not kept.
"""

from __future__ import annotations

import math
import sys
from array import array
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple, Protocol

from gpuprobe.analysis.trace.lifetimes import lifetimes_of
from gpuprobe.errors import SnapshotError
from gpuprobe.model.actions import ALLOC, OOM
from gpuprobe.model.io.files import gc_paused
from gpuprobe.model.memory import Block, BlockState, Segment, TraceAction
from gpuprobe.model.text import shortened
from gpuprobe.model.trace import (
    COLUMNS,
    MOST_DEPTH,
    AllocatorSettings,
    Annotation,
    LiveColumns,
    MemoryTrace,
    StackTable,
    left_out,
    parse_tag,
)
from gpuprobe.model.values import NewestMicroseconds
from gpuprobe.torch_support.irregularities import ANNOTATIONS, SETTINGS, Irregularities

_CROWDED = 8
"""From so many stacks with the same signature on, a key of all frames distinguishes them."""

_LONG = 2048
"""Frames of a stack that is not compared with others: each comparison of two lists takes as long as
they are, and a file can refer to them at every event. Python stops a recursion at 1,000 frames."""

_SAMPLE = 256
"""So many events decide whether lists are shared. A wrong guess costs time only."""


class StackInterner:
    """Fills a `StackTable`. The dictionaries and lists it was given must stay alive and
    unchanged as long as it is used, since it knows them by identity.
    """

    def __init__(self, table: StackTable, irregular: Irregularities | None = None) -> None:
        self._table = table
        self._irregular = irregular or Irregularities()
        self._frames: dict[int, int] = {}  # id of a frame's dict -> frame index
        self._lists: dict[int, int] = {}  # id of a list -> stack index
        # A list's length and two of its frames -> pairs (list, stack index).
        self._signatures: dict[object, list[tuple[object, int]]] = {}
        self._exact: dict[tuple[int, ...], int] = {}

    def one(self, frames: object) -> int:
        """The stack index of one list of frames."""
        found = self._lists.get(id(frames))
        if found is None:
            found = self._lists[id(frames)] = self._alike(frames)
        return found

    def _alike(self, frames: Any) -> int:
        """The index of a list that may be equal to an earlier one."""
        count = len(frames) if isinstance(frames, list) else 0
        if not 0 < count <= _LONG:
            return self._add(frames)
        signature = (count, id(frames[count >> 2]), id(frames[count >> 1]))
        alike = self._signatures.setdefault(signature, [])
        if len(alike) > _CROWDED:
            key = tuple(map(id, frames))
            index = self._exact.get(key)
            if index is None:
                index = self._exact[key] = self._add(frames)
            return index
        for other, index in alike:
            if other == frames:
                return index
        index = self._add(frames)
        alike.append((frames, index))
        return index

    def column(self, events: list[Any]) -> array[int] | None:
        """The stack index of every event; None where none has frames. May be called for one
        stretch of the events after the other.
        """
        try:
            return self._column(events, itemgetter("frames"))
        except (KeyError, TypeError):  # TypeError: not a list
            if not any(event.get("frames") for event in events):
                return None
            listed = self._irregular.frames
            return array("I", [self.one(listed(event.get("frames"))) for event in events])

    def _column(self, events: list[object], get: Callable[[Any], object]) -> array[int]:
        some = [id(get(event)) for event in events[:_SAMPLE]]
        if len(set(some)) * 2 <= len(some):
            return array("I", map(self.one, map(get, events)))
        return self._unshared(map(get, events))

    def _unshared(self, lists: Iterable[Any]) -> array[int]:
        """Stack indices if most events have a separate list."""
        result: list[int] = []
        append, alike = result.append, self._alike
        last: object = None
        index = 0
        for frames in lists:
            if len(frames) > _LONG:
                index, last = self.one(frames), None
            elif frames != last:  # both halves of a free have the stack of the first
                index, last = alike(frames), frames
            append(index)
        return array("I", result)

    def _add(self, frames: object) -> int:
        if not isinstance(frames, (list, tuple)):
            frames = self._irregular.frames(frames)
        self._irregular.stack(len(frames))
        outer = len(frames) - MOST_DEPTH + 1
        if outer > 1:
            frames = frames[: MOST_DEPTH - 1]
        known = self._frames
        try:
            ids = tuple(map(known.__getitem__, map(id, frames)))
        except KeyError:
            for frame in frames:
                if id(frame) not in known:
                    known[id(frame)] = self._irregular.index(self._table, frame)
            ids = tuple(map(known.__getitem__, map(id, frames)))
        if outer > 1:
            ids = *ids, self._table.frame(left_out(outer))
        return self._table.stack(ids)


class PartSink:
    """Passes columns on, part by part; one that is zero throughout is never begun."""

    def __init__(self, append: Callable[[str, array[int]], None]) -> None:
        self._append = append
        self._rows = 0  # in the parts before this one
        self._part = 0
        self._passed_on: dict[str, int] = {}  # rows passed on

    def begin(self, rows: int) -> None:
        self._rows += self._part
        self._part = rows

    def put(self, column: str, values: array[int] | None) -> None:
        """The part of a column, None for zeros."""
        if values is None:
            return
        self._fill(column, self._rows)
        self._append(column, values)
        self._passed_on[column] += len(values)

    def end(self) -> None:
        for column in self._passed_on:
            self._fill(column, self._rows + self._part)

    def _fill(self, column: str, rows: int) -> None:
        """Add the zeros that were left out."""
        missing = rows - self._passed_on.setdefault(column, 0)
        if missing:
            typecode = COLUMNS[column]
            self._append(column, array(typecode, bytes(missing * array(typecode).itemsize)))
            self._passed_on[column] = rows


class InternedColumn:
    """A column of indices of values that repeat; ``index`` is called once per value."""

    def __init__(self, key: str, index: Callable[[Any], int]) -> None:
        self._key = key
        self._index = index
        self._table: dict[object, int] = {None: 0}  # None: the event has no such key
        self._zeros = True

    def column(self, events: list[Any]) -> array[int] | None:
        try:
            values = list(map(itemgetter(self._key), events))
        except KeyError:
            values = [event.get(self._key) for event in events]
        return self.of(values)

    def of(self, values: list[object], different: set[object] | None = None) -> array[int] | None:
        """The column of these values, of which there are so many different ones; None for zeros."""
        table = self._table
        try:
            if self._zeros:
                if different is None:
                    # Comparing is quicker than hashing, and most often there is but one.
                    one = values.count(values[0]) == len(values)
                    different = set(values[:1] if one else values)
                if table.keys() >= different:
                    return None
                raise KeyError
            return array("I", map(table.__getitem__, values))
        except KeyError:
            for value in dict.fromkeys(values):
                if value not in table:
                    table[value] = self._index(value)
            self._zeros = not any(table.values())
            return None if self._zeros else array("I", map(table.__getitem__, values))


_HIGHEST_BYTES = slice(7 if sys.byteorder == "little" else 0, None, 8)


def are_times(column: array[int]) -> bool:
    """Whether all are times, in microseconds. Below 2**56, in the year 4253, all are: then no
    number has to be looked at.
    """
    if column.tobytes()[_HIGHEST_BYTES].count(0) == len(column):
        return True
    return 0 <= min(column) <= max(column) <= NewestMicroseconds


def column_of(typecode: str, name: str, events: list[Any]) -> array[int] | None:
    """A column of numbers that older snapshots lack; None where no event has it."""
    try:
        return array(typecode, map(itemgetter(name), events))
    except KeyError:
        if not any(name in event for event in events):
            return None
        return array(typecode, [event.get(name, 0) for event in events])


_MIB = 1024 * 1024
_CODES = {action.value: action.code for action in TraceAction}
_HINT = "create one with torch.cuda.memory._dump_snapshot(path)"
_MALFORMED = (
    KeyError,
    TypeError,
    ValueError,
    OverflowError,
    AttributeError,
    IndexError,
    RecursionError,
)


class Keep(Protocol):
    """Takes what is decoded, as it comes."""

    def column(self, device: int, name: str, values: array[int]) -> None:
        """The next part of a column of events."""

    def layout(self, trace: MemoryTrace) -> None:
        """A trace of which all is known that its accounts need: of the columns those up to
        ``pool``; all others, strings and stacks follow.
        """


_STRETCH = 8192
"""So many events at a time: what one column's pass fetched is still in the processor's cache
when the next column's pass comes."""


MOST_DEVICES = 128
"""torch has no more: ``DeviceIndex`` is an int8_t (c10/core/Device.h)."""


class Decoded(NamedTuple):
    """A decoded snapshot. ``foreign`` counts entries with an unknown action, ``irregular`` the
    details that were kept as unknown (`gpuprobe.torch_support.irregularities`)."""

    traces: list[MemoryTrace]
    foreign: dict[str, int]
    irregular: dict[str, int] = {}  # noqa: RUF012 (never changed)


def devices_of(snapshot: object) -> list[int]:
    """The devices that a snapshot describes, in order."""
    segments, traces = _top(snapshot)
    found = {_device(segment) for segment in segments}
    found.update(index for index, events in enumerate(traces) if events)
    if max(found, default=0) >= MOST_DEVICES:
        raise ValueError(f"it has traces of device {max(found)}, but torch supports {MOST_DEVICES}")
    return sorted(found) or list(range(min(len(traces), 1)))


def decode(
    snapshot: object,
    *,
    only: int | None = None,
    limit: int | None = None,
    keep: Keep | None = None,
    size: int | None = None,
) -> Decoded:
    """The traces of a snapshot, one per device (or of the device ``only``).

    ``keep`` may take over the columns of events, part by part, so that they are not held here:
    first those that accounts of memory need. Its owner then calls `add_baseline`. ``limit`` bounds
    the events and blocks that are read: a pickle can refer to one list many times, and so describe
    more than it holds; ``size``, the file's size in bytes, bounds names and stacks likewise.
    Raises SnapshotError, with the problem and its place, for anything that is not a snapshot.
    """
    place = _Place()
    try:
        if only is None:
            devices = devices_of(snapshot)
        else:
            devices = [only]
        irregular = Irregularities(size)
        decoder = _Decoder(snapshot, place, math.inf if limit is None else limit, keep, irregular)
        found = decoder.run(devices)
        if keep is None:
            place.text = "its events"
            for trace in found.traces:
                add_baseline(trace)
        return found
    except SnapshotError:
        raise
    except MemoryError:
        raise SnapshotError("the snapshot needs more memory than this machine has") from None
    except KeyError as error:
        name = " ".join(str(error).split())[:80]
        raise SnapshotError(
            f"not a torch memory snapshot: {place}: {name} is missing", hint=_HINT
        ) from None
    except _MALFORMED as error:
        what = " ".join(str(error).split())[:160]
        raise SnapshotError(f"not a torch memory snapshot: {place}: {what}", hint=_HINT) from None


def trace_of(snapshot: dict[str, object], device: int) -> MemoryTrace:
    """The trace of one CUDA device (its index) in a snapshot that torch has just returned in this
    process.

    The dictionary is not changed. Raises SnapshotError where it is not a snapshot.
    """
    with gc_paused():
        return decode(snapshot, only=device).traces[0]


class _Place:
    """Where the decoder is, for messages."""

    text = "its top level"

    def __str__(self) -> str:
        return self.text


def _top(snapshot: object) -> tuple[list[Any], list[object]]:
    if isinstance(snapshot, list):
        return snapshot, []
    if not isinstance(snapshot, dict):
        raise TypeError(f"a {type(snapshot).__name__}, not a dictionary or a list of segments")
    if "segments" not in snapshot and "device_traces" not in snapshot:
        raise TypeError("it has neither 'segments' nor 'device_traces'")
    return (
        _listed(snapshot.get("segments", []), "segments"),
        _listed(snapshot.get("device_traces", []), "device_traces"),
    )


def _listed(value: object, name: str) -> list[object]:
    if not isinstance(value, list):
        raise TypeError(f"{name} is a {type(value).__name__}, not a list")
    return value


def _count(value: object, name: str) -> int:
    """A count of bytes, an address or an id: 0 … 2**64 - 1."""
    if value.__class__ is not int:
        raise TypeError(f"{name} is a {type(value).__name__}, not a whole number")
    if not 0 <= value < 1 << 64:
        raise ValueError(f"{name} is out of range")
    return int(value)


def _text(value: object, name: str) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{name} is a {type(value).__name__}, not text")
    return value


def _device(segment: object) -> int:
    if not isinstance(segment, dict):
        raise TypeError(f"a segment is a {type(segment).__name__}, not a dictionary")
    device = _count(segment.get("device", 0), "device")
    if device >= MOST_DEVICES:
        raise ValueError("a segment's device is out of range")
    return device


def _pool(value: object) -> tuple[int, int]:
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        raise TypeError("a pool id is not a pair")
    return _count(value[0], "pool id"), _count(value[1], "pool id")


class _Decoder:
    def __init__(
        self,
        snapshot: object,
        place: _Place,
        limit: float,
        keep: Keep | None,
        irregular: Irregularities,
    ) -> None:
        self._segments, self._traces = _top(snapshot)
        self._plain: dict[str, object] = snapshot if isinstance(snapshot, dict) else {}
        self._place = place
        self._left = limit
        self._foreign: dict[str, int] = {}
        self._keep = keep
        self._irregular = irregular

    def _spend(self, count: int) -> None:
        self._left -= count
        if self._left < 0:
            raise SnapshotError(
                "the snapshot repeats the same entries so often that it describes more than a "
                "file of its size can hold",
                hint=_HINT,
            )

    def run(self, devices: Sequence[int]) -> Decoded:
        self._place.text = "allocator_settings"
        settings = self._irregular.or_nothing(
            SETTINGS, lambda: _settings(self._plain.get("allocator_settings"))
        )
        self._place.text = "external_annotations"
        annotations = self._annotations()
        traces = []
        for device in devices:
            traces.append(self._trace(device, settings, annotations.get(device, ())))
        irregular = {what: count for what, count in self._irregular.counts.items() if count}
        return Decoded(traces, self._foreign, irregular)

    def _annotations(self) -> dict[int, tuple[Annotation, ...]]:
        listed = self._plain.get("external_annotations") or []
        if not isinstance(listed, list):
            self._irregular.counts[ANNOTATIONS] += 1
            listed = []
        self._spend(len(listed))
        found: dict[int, list[Annotation]] = {}
        for entry in listed:
            read = self._irregular.or_nothing(ANNOTATIONS, lambda: self._annotation(entry))  # noqa: B023
            if read is not None:
                found.setdefault(read[0], []).append(read[1])
        when = itemgetter(2)
        return {device: tuple(sorted(notes, key=when)) for device, notes in found.items()}

    def _annotation(self, entry: Any) -> tuple[int, Annotation]:
        time = _count(entry.get("time_us", 0), "time_us")
        if time > NewestMicroseconds:
            raise ValueError("time_us is out of range")
        return _count(entry.get("device", 0), "device"), Annotation(
            self._irregular.name(_text(entry.get("stage", ""), "stage")),
            self._irregular.name(_text(entry.get("name", ""), "name")),
            time,
        )

    def _trace(
        self,
        device: int,
        settings: AllocatorSettings | None,
        annotations: tuple[Annotation, ...],
    ) -> MemoryTrace:
        trace = MemoryTrace(device=f"cuda:{device}", settings=settings, annotations=annotations)
        stacks = StackInterner(trace.stacks, self._irregular)
        pools: dict[tuple[int, int], int] = {(0, 0): 0}
        segments = []
        for index, plain in enumerate(self._segments):
            self._place.text = f"segments[{index}]"
            if _device(plain) == device:
                segments.append(self._segment(plain, device, stacks))
                pools.setdefault(segments[-1].pool_id, len(pools))
        trace.segments = tuple(segments)
        parts: list[list[object]] = []
        name = f"device_traces[{device}]"
        put = self._put(device, trace)
        if device < len(self._traces):
            self._place.text = name
            events = _listed(self._traces[device], name)
            self._spend(len(events))
            parts = self._accounts(events, name, put, pools)
        trace.pools = list(pools)
        if self._keep is not None:
            self._keep.layout(trace)
        self._details(parts, name, put, trace, stacks)
        return trace

    def _put(self, device: int, trace: MemoryTrace) -> Callable[[str, array[int]], None]:
        """Where columns go, part by part."""
        if self._keep is not None:
            return partial(self._keep.column, device)
        return lambda column, values: getattr(trace.events, column).extend(values)

    def _accounts(
        self,
        events: list[Any],
        name: str,
        put: Callable[[str, array[int]], None],
        pools: dict[tuple[int, int], int],
    ) -> list[list[Any]]:
        """Read the columns that accounts of memory need. Returns the events without the unknown
        ones, in parts.
        """
        place = self._place
        sink = PartSink(put)
        pool = InternedColumn("pool_id", lambda value: pools.setdefault(_pool(value), len(pools)))
        parts = []
        for start in range(0, len(events), _STRETCH):
            part = events[start : start + _STRETCH]
            try:
                action = array("B", map(_CODES.__getitem__, map(itemgetter("action"), part)))
            except (KeyError, TypeError):
                part = self._known(part, start, name)
                action = array("B", [_CODES[event["action"]] for event in part])
            if not part:
                continue
            parts.append(part)
            sink.begin(len(part))
            sink.put("action", action)
            place.text = f"'addr' in {name}"
            if OOM in action:
                pairs = [(code == OOM, event) for code, event in zip(action, part, strict=True)]
                at = [0 if oom else event["addr"] for oom, event in pairs]
                sink.put("address", array("Q", at))
                free = [event.get("device_free", 0) if oom else 0 for oom, event in pairs]
                sink.put("device_free", array("Q", free))
            else:
                sink.put("address", array("Q", map(itemgetter("addr"), part)))
            place.text = f"'size' in {name}"
            sink.put("size", array("Q", map(itemgetter("size"), part)))
            place.text = f"'stream' in {name}"
            sink.put("stream", column_of("Q", "stream", part))
            place.text = f"'pool_id' in {name}"
            sink.put("pool", pool.column(part))
            place.text = name
        sink.end()
        return parts

    def _details(
        self,
        parts: Iterable[list[object]],
        name: str,
        put: Callable[[str, array[int]], None],
        trace: MemoryTrace,
        stacks: StackInterner,
    ) -> None:
        """Read the columns with times and places in the program. Their receiver computes the
        accounts meanwhile, so each is passed on once it is complete.
        """
        place = self._place
        found: dict[str, array[int]] = {}
        sink = PartSink(
            lambda column, values: found.setdefault(column, array(values.typecode)).extend(values)
        )
        string = trace.stacks.string
        name_of = self._irregular.name
        phase = InternedColumn("user_metadata", lambda value: string(name_of(parse_tag(value)[0])))
        module = InternedColumn("user_metadata", lambda value: string(name_of(parse_tag(value)[1])))
        for part in parts:
            sink.begin(len(part))
            place.text = f"'time_us' in {name}"
            sink.put("time_us", self._times(part))
            place.text = f"'user_metadata' in {name}"
            tags, different = self._tags(part)
            sink.put("phase", phase.of(tags, different))
            sink.put("module", module.of(tags, different))
            place.text = f"'frames' in {name}"
            sink.put("stack", stacks.column(part))
        sink.end()
        for column, values in found.items():
            put(column, values)

    def _times(self, events: list[Any]) -> array[int] | None:
        try:
            found = column_of("q", "time_us", events)
        except (TypeError, OverflowError):
            found = self._irregular.times([event.get("time_us", 0) for event in events])
        if found and not are_times(found):
            found = self._irregular.times(list(found))
        return found

    def _tags(self, events: list[Any]) -> tuple[list[object], set[object]]:
        """The phase of each event, None where it has none; and which phases there are."""
        try:
            tags = list(map(itemgetter("user_metadata"), events))
        except KeyError:
            tags = [event.get("user_metadata") for event in events]
        try:
            different = set(tags)
        except TypeError:  # something that cannot be in a set is no text
            different = {0}
        if not {str, type(None)}.issuperset(map(type, different)):
            tags = self._irregular.tags(tags)
            different = set(tags)
        return tags, different

    def _known(self, events: list[object], start: int, name: str) -> list[Any]:
        """Only the entries whose action is known; the others are counted, not guessed at.

        Programs can add custom entries (``user_defined``), which are not events of the allocator.
        """
        known = []
        for index, event in enumerate(events, start):
            self._place.text = f"{name}[{index}]"
            if not isinstance(event, dict):
                raise TypeError(f"a {type(event).__name__}, not a dictionary")
            action = _text(event["action"], "action")
            if action in _CODES:
                known.append(event)
            else:
                action = action[:40]
                if action not in self._foreign and len(self._foreign) >= 16:
                    raise ValueError("too many kinds of unknown actions")
                self._foreign[action] = self._foreign.get(action, 0) + 1
        self._place.text = name
        if start == 0 and not known and "user_defined" not in self._foreign:
            raise ValueError(f"no known action; the first is {next(iter(self._foreign))!r}")
        return known

    def _segment(self, plain: dict[str, Any], device: int, stacks: StackInterner) -> Segment:
        listed = _listed(plain.get("blocks", []), "blocks")
        self._spend(len(listed) + 1)
        start = address = _count(plain["address"], "address")
        total = _count(plain["total_size"], "total_size")
        blocks = []
        for entry in listed:
            block = _block(entry, address, stacks)
            blocks.append(block)
            address = block.address + block.size
        if address > start + total:
            raise ValueError("its blocks are larger than the segment")
        return Segment(
            device=device,
            address=start,
            total_size=total,
            stream=_count(plain.get("stream", 0), "stream"),
            segment_type=_text(plain.get("segment_type", "large"), "segment_type")[:80],
            pool_id=_pool(plain.get("segment_pool_id", (0, 0))),
            is_expandable=bool(plain.get("is_expandable", False)),
            blocks=tuple(blocks),
            stack=stacks.one(plain.get("frames") or []),
        )


def _block(entry: object, address: int, stacks: StackInterner) -> Block:
    if not isinstance(entry, dict):
        raise TypeError(f"a block is a {type(entry).__name__}, not a dictionary")
    size = _count(entry["size"], "size")
    state = BlockState.parse(_text(entry["state"], "state"))
    if "address" in entry:
        found = _count(entry["address"], "address")
        if found < address:
            raise ValueError("its blocks overlap, or are not in order")
        address = found
    if state is BlockState.INACTIVE:
        # torch leaves the size and the stack of the last owner in a hole.
        return Block(address, size, 0, state)
    frames, requested = entry.get("frames"), entry.get("requested_size", size)
    history = entry.get("history")
    if frames is None and isinstance(history, list) and history and isinstance(history[0], dict):
        frames, requested = history[0].get("frames"), history[0].get("real_size", size)
    return Block(address, size, _count(requested, "size"), state, stacks.one(frames or []))


def add_baseline(trace: MemoryTrace) -> None:
    """Work out ``trace.baseline``: what was allocated before the first event.

    The rule: a block was there before if the first event of its address is a free, or if no event
    has its address and it is allocated at the end. Its size is the requested size, as the free (or
    the final block) has it. The stack of a free is the place of the free, so only blocks that lived
    to the end have the stack of their allocation.
    Blocks whose free had been requested before the trace are not in it: they were not
    allocated any more.
    """
    events = trace.events
    trace.lifetimes = ends = lifetimes_of(trace)
    live = LiveColumns()
    streams, pools = events.column("stream"), events.column("pool")
    for i in ends.at_start():
        live.append(ALLOC, events.address[i], events.size[i], stream=streams[i], pool=pools[i])
    index = {pool: i for i, pool in enumerate(trace.pools)}
    for segment in trace.segments:
        for block in segment.blocks:
            if block.state is BlockState.ALLOCATED and block.address not in ends.first:
                live.append(
                    ALLOC,
                    block.address,
                    block.requested_size or block.size,
                    stream=segment.stream,
                    stack=block.stack,
                    pool=index[segment.pool_id],
                )
    trace.baseline = live


_OWN_FIELDS = {
    "expandable_segments",
    "garbage_collection_threshold",
    "max_split_size",
    "PYTORCH_CUDA_ALLOC_CONF",
    "roundup_power2_divisions",
}


def _settings(plain: object) -> AllocatorSettings | None:
    if not plain:
        return None
    if not isinstance(plain, dict):
        raise TypeError(f"a {type(plain).__name__}, not a dictionary")
    conf = _text(plain.get("PYTORCH_CUDA_ALLOC_CONF", ""), "PYTORCH_CUDA_ALLOC_CONF")
    threshold = plain.get("garbage_collection_threshold", 0.0)
    if not isinstance(threshold, (int, float)) or not math.isfinite(threshold):
        raise TypeError("garbage_collection_threshold is not a number")
    divisions = plain.get("roundup_power2_divisions") or {}
    if not isinstance(divisions, dict):
        raise TypeError("roundup_power2_divisions is not a dictionary")
    written = dict(part.strip().split(":", 1) for part in conf.split(",") if part.count(":") == 1)
    extra: dict[str, str | int | float | bool] = {}
    for key, value in plain.items():
        if key not in _OWN_FIELDS and isinstance(value, (str, int, float, bool)):
            name = shortened(_text(key, "a setting's name"))
            extra[name] = shortened(value) if isinstance(value, str) else value
    return AllocatorSettings(
        expandable_segments=bool(plain.get("expandable_segments", False)),
        max_split_size=_limit(plain.get("max_split_size", -1)),
        # Not written, it is the size of large segments (``CUDAAllocatorConfig::parseArgs``).
        max_non_split_rounding=_mib(
            {"max_non_split_rounding_mb": written.get("large_segment_size_mb", "20"), **written},
            "max_non_split_rounding_mb",
        ),
        garbage_collection_threshold=float(threshold),
        roundup_power2_divisions={
            int(key): _count(value, "roundup_power2_divisions") for key, value in divisions.items()
        },
        large_segment_size=_mib(written, "large_segment_size_mb"),
        conf=shortened(conf),
        extra=extra,
    )


def _limit(value: object) -> int:
    """A limit in bytes; torch writes "none" as -1, or as the largest number."""
    if value.__class__ is not int:
        raise TypeError(f"max_split_size is a {type(value).__name__}, not a whole number")
    return int(value) if 0 <= value < (1 << 63) - 1 else -1


def _mib(written: dict[str, str], name: str) -> int:
    """A size the snapshot has only in the settings' text; torch's default is 20 MiB."""
    text = written.get(name, "").strip()
    return int(text) * _MIB if text.isdecimal() and len(text) < 12 else 20 * _MIB
