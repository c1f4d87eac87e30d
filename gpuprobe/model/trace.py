"""Allocation traces in columns: a million events in a few flat arrays.

Everything that produces allocation events (torch snapshots, the sampler, a simulated GPU)
fills an `EventColumns`; everything that analyses them reads one. Strings, stacks and frames
are interned in `StackTable` and referred to by index; index 0 always means "none".
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, Final, NamedTuple

from gpuprobe.model.memory import Segment, TraceAction
from gpuprobe.model.record import record
from gpuprobe.model.run.holders import Holder
from gpuprobe.model.values import Time


class Frame(NamedTuple):
    """One stack frame: where the code is."""

    filename: str
    line: int
    name: str


def known_line(line: object) -> int | None:
    """The line of a frame; None where it is a number that no file has a line of. torch writes such
    ones for frames of native code.
    """
    return line if type(line) is int and 0 <= line < 1 << 31 else None


class StackTable:
    """Interned strings, frames and stacks.

    A stack is a tuple of frame indices, **innermost first** (torch's order). Index 0 of
    ``strings``, ``frames`` and ``stacks`` is the empty one.
    """

    __slots__ = ("_frame_ids", "_stack_ids", "_string_ids", "frames", "stacks", "strings")

    def __init__(self) -> None:
        self.strings: list[str] = [""]
        self.frames: list[Frame] = [Frame("", 0, "")]
        self.stacks: list[tuple[int, ...]] = [()]
        self._string_ids: dict[str, int] = {"": 0}
        self._frame_ids: dict[Frame, int] = {self.frames[0]: 0}
        self._stack_ids: dict[tuple[int, ...], int] = {(): 0}

    @classmethod
    def of(
        cls, strings: list[str], frames: list[Frame], stacks: list[tuple[int, ...]]
    ) -> StackTable:
        """A table from its three lists, as read from a file. Index 0 of each is the empty one."""
        table = cls()
        table.strings, table.frames, table.stacks = strings, frames, stacks
        table._string_ids = {text: index for index, text in enumerate(strings)}
        table._frame_ids = {frame: index for index, frame in enumerate(frames)}
        table._stack_ids = {stack: index for index, stack in enumerate(stacks)}
        return table

    def string(self, text: str) -> int:
        """The index of ``text``, added if new."""
        found = self._string_ids.get(text)
        if found is None:
            found = self._string_ids[text] = len(self.strings)
            self.strings.append(text)
        return found

    def frame(self, frame: Frame) -> int:
        """The index of ``frame``, added if new."""
        found = self._frame_ids.get(frame)
        if found is None:
            found = self._frame_ids[frame] = len(self.frames)
            self.frames.append(frame)
        return found

    def stack(self, frame_ids: tuple[int, ...]) -> int:
        """The index of the stack made of these frame indices, added if new."""
        found = self._stack_ids.get(frame_ids)
        if found is None:
            found = self._stack_ids[frame_ids] = len(self.stacks)
            self.stacks.append(frame_ids)
        return found

    def frames_of(self, stack: int) -> tuple[Frame, ...]:
        """The frames of a stack, innermost first."""
        frames = self.frames
        return tuple(frames[i] for i in self.stacks[stack])

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, StackTable):
            return NotImplemented
        return (self.strings, self.frames, self.stacks) == (
            other.strings,
            other.frames,
            other.stacks,
        )

    __hash__ = None  # type: ignore[assignment]


MOST_DEPTH: Final = 2048
"""Frames of a stack, of the trace that a file is decoded to. Python stops a recursion at 1,000, but
a file may describe any depth, and everything that shows stacks takes time and memory for each."""


def left_out(frames: int) -> Frame:
    """The last frame of a stack whose outermost ``frames`` are left out: every view shows it."""
    return Frame("", 0, f"({frames:,} outer frames left out)")


def with_most_depth(table: StackTable) -> StackTable:
    """The table with stacks of at most `MOST_DEPTH` frames; the same if it has no deeper ones."""
    if max(map(len, table.stacks)) <= MOST_DEPTH:
        return table
    frames = [*table.frames]
    stacks = []
    for stack in table.stacks:
        if len(stack) > MOST_DEPTH:
            frames.append(left_out(len(stack) - MOST_DEPTH + 1))
            stack = (*stack[: MOST_DEPTH - 1], len(frames) - 1)
        stacks.append(stack)
    return StackTable.of(table.strings, frames, stacks)


# name -> array typecode. 'Q' 8-byte unsigned, 'q' 8-byte signed, 'I' 4-byte unsigned,
# 'B' one byte. Additions append; a reader treats a missing column as all zero.
COLUMNS: dict[str, str] = {
    "action": "B",  # TraceAction.code
    "address": "Q",  # device pointer; for oom: 0
    # Bytes. For alloc, free_… and oom those *requested* (torch's ``block->requested_size``), for
    # segment_… those obtained from or released to the driver.
    "size": "Q",
    "stream": "Q",  # cudaStream_t
    "time_us": "q",  # microseconds since the Unix epoch; 0 where unknown
    "stack": "I",  # index into StackTable.stacks
    "category": "B",  # Category.code; 0 unknown
    "module": "I",  # index into StackTable.strings: dotted module path
    "phase": "I",  # index into StackTable.strings: phase path such as "forward"
    "pool": "I",  # index into MemoryTrace.pools; 0 is the default pool
    "device_free": "Q",  # oom only: bytes the driver had free; else 0
    # Where the uses of memory were traced (`gpuprobe.sampler.tracing.uses`). Operators are counted
    # from 1 as they begin, from the start of the recording; 0 means none.
    "operator": "I",  # the last one that had begun when the event happened
    "made": "I",  # alloc only: the operator that made a tensor on the block; 0: none, a library's
    "first_use": "I",  # alloc only: the first operator that used its values
    "last_use": "I",  # alloc only: the last one that used it, in this trace
    "last_stack": "I",  # index into StackTable.stacks: the line of that one
    "last_name": "I",  # index into StackTable.strings: its name
    "last_phase": "I",  # index into StackTable.strings: its phase
    "grad": "B",  # alloc only: GRAD_ON or GRAD_OFF as the operator ran that made it; 0: unknown
    "made_name": "I",  # index into StackTable.strings: the name of the operator that made it
    "first_name": "I",  # index into StackTable.strings: the name of ``first_use``
    # What operators did with its values (`gpuprobe.sampler.tracing.flow`). A block is referred to
    # by the row of its event plus 1, or by the number of events plus its row in the baseline plus
    # 1; 0 means none.
    "made_phase": "I",  # index into StackTable.strings: its phase
    "how": "B",  # `Made`: what kind of operator that is
    "width": "B",  # bytes of one element of the tensor that it made
    "inputs": "Q",  # bytes of the distinct memory that it computed the tensor from
    "source": "I",  # the block with the most of these bytes
    "copied_to": "I",  # the last block that its values were copied to, or converted
    "read": "Q",  # at most this many of its bytes are read in this trace
    "useful": "I",  # the last operator that used it for something that is read
    "wasted": "B",  # 1: computed in a backward pass, and nothing but such memory depends on it
    "filled": "I",  # the last operator that set all of it to one value
    "filled_until": "I",  # the first one after that which used it
    # Blocks of events with the same number are computed from one another in the forward pass; sums
    # of single numbers do not count.
    "graph": "I",
    # Of a batch of integers that was copied to the device: the bytes at the ends of its rows that
    # have one value in all of them.
    "padded": "Q",
}

GRAPH_REPLAY: Final = "replay of a CUDA graph"
"""The name of the operator that a replay counts as."""

GRAD_ON: Final = 1
GRAD_OFF: Final = 2
"""The grad mode of an allocation. Custom functions of autograd run without gradients."""

USE_COLUMNS: Final = frozenset(list(COLUMNS)[list(COLUMNS).index("operator") :])
"""The columns that are filled where the uses of memory were traced."""


class Made(IntEnum):
    """Kinds of operators that make tensors."""

    OTHER = 0
    POINTWISE = 1  # each element from those at its place, after broadcasting
    COPY = 2  # elements as they are, in another order, number or type
    FILL = 3  # from no other tensor


class TraceEvent(NamedTuple):
    """One event, for code that wants rows instead of columns."""

    action: TraceAction
    address: int
    size: int
    stream: int
    time_us: int
    stack: int
    category: int
    module: int
    phase: int
    pool: int
    device_free: int
    operator: int = 0
    made: int = 0
    first_use: int = 0
    last_use: int = 0
    last_stack: int = 0
    last_name: int = 0
    last_phase: int = 0
    grad: int = 0
    made_name: int = 0
    first_name: int = 0
    made_phase: int = 0
    how: int = 0
    width: int = 0
    inputs: int = 0
    source: int = 0
    copied_to: int = 0
    read: int = 0
    useful: int = 0
    wasted: int = 0
    filled: int = 0
    filled_until: int = 0
    graph: int = 0
    padded: int = 0


class EventColumns:
    """A sequence of allocator events as parallel arrays.

    All arrays have the same length, except that an optional column (all but ``action``,
    ``address`` and ``size``) may be empty, which means zero in every row.
    """

    __slots__ = tuple(COLUMNS)

    action: array[int]
    address: array[int]
    size: array[int]
    stream: array[int]
    time_us: array[int]
    stack: array[int]
    category: array[int]
    module: array[int]
    phase: array[int]
    pool: array[int]
    device_free: array[int]
    operator: array[int]
    made: array[int]
    first_use: array[int]
    last_use: array[int]
    last_stack: array[int]
    last_name: array[int]
    last_phase: array[int]
    grad: array[int]
    made_name: array[int]
    first_name: array[int]
    made_phase: array[int]
    how: array[int]
    width: array[int]
    inputs: array[int]
    source: array[int]
    copied_to: array[int]
    read: array[int]
    useful: array[int]
    wasted: array[int]
    filled: array[int]
    filled_until: array[int]
    graph: array[int]
    padded: array[int]

    def __init__(self) -> None:
        for name, typecode in COLUMNS.items():
            setattr(self, name, array(typecode))

    def __len__(self) -> int:
        return len(self.action)

    def append(
        self,
        action: int,
        address: int,
        size: int,
        stream: int = 0,
        time_us: int = 0,
        stack: int = 0,
        category: int = 0,
        module: int = 0,
        phase: int = 0,
        pool: int = 0,
        device_free: int = 0,
    ) -> None:
        """Add one event. Fills every column but those of uses: do not mix with hand-filled empty
        columns.
        """
        self.action.append(action)
        self.address.append(address)
        self.size.append(size)
        self.stream.append(stream)
        self.time_us.append(time_us)
        self.stack.append(stack)
        self.category.append(category)
        self.module.append(module)
        self.phase.append(phase)
        self.pool.append(pool)
        self.device_free.append(device_free)
        if self.made:
            for name in USE_COLUMNS:
                getattr(self, name).append(0)

    def column(self, name: str) -> Sequence[int]:
        """The column, or zeros of the right length where it was left empty."""
        values: array[int] = getattr(self, name)
        return values if len(values) == len(self.action) else _Zeros(len(self.action))

    def row(self, index: int) -> TraceEvent:
        """The event at ``index`` (0 ≤ index < len)."""
        values = [self.column(name)[index] for name in COLUMNS]
        return TraceEvent(TraceAction.from_code(values[0]), *values[1:])

    def rows(self) -> Iterator[TraceEvent]:
        """Every event in order. Slow; for tests, small traces and single stacks."""
        for values in zip(*(self.column(name) for name in COLUMNS), strict=True):
            yield TraceEvent(TraceAction.from_code(values[0]), *values[1:])

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, EventColumns):
            return NotImplemented
        return all(list(self.column(n)) == list(other.column(n)) for n in COLUMNS)

    __hash__ = None  # type: ignore[assignment]


class _Zeros(Sequence[int]):
    """A column that was left empty: zeros without the memory."""

    __slots__ = ("_length",)

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int | slice) -> int | Sequence[int]:  # type: ignore[override]
        if isinstance(index, slice):
            return _Zeros(len(range(*index.indices(self._length))))
        if not -self._length <= index < self._length:
            raise IndexError(index)
        return 0

    def __iter__(self) -> Iterator[int]:
        return iter(bytes(self._length))


class LiveColumns(EventColumns):
    """Blocks that were alive at one instant; ``action`` is ``alloc`` in every row.

    Used as the baseline of a trace: the memory that was already allocated when recording
    began. It is a separate row in every account, never dropped.
    """

    __slots__ = ()


@record(frozen=True, slots=True)
class AllocatorSettings:
    """``PYTORCH_CUDA_ALLOC_CONF`` as the allocator understood it.

    ``roundup_power2_divisions`` maps the lower bound of each size class, in MiB (1, 2, 4 …
    32768), to its number of divisions, 0 for off. ``max_split_size`` and
    ``max_non_split_rounding`` are in bytes, -1 for "no limit".
    """

    expandable_segments: bool = False
    max_split_size: int = -1
    max_non_split_rounding: int = 20 * 1024 * 1024
    garbage_collection_threshold: float = 0.0
    roundup_power2_divisions: dict[int, int] = field(default_factory=dict)
    large_segment_size: int = 20 * 1024 * 1024
    conf: str = ""  # the text the program had set
    extra: dict[str, str | int | float | bool] = field(default_factory=dict)


class Annotation(NamedTuple):
    """A mark made outside the allocator: torch's ``external_annotations``.

    torch.optim brackets each ``Optimizer.step`` and ``Optimizer.zero_grad`` with a pair of
    them, while memory history is being recorded. Training steps can be derived from these.
    """

    stage: str  # "START" or "END"
    name: str  # "Optimizer.step#AdamW.step"
    time_us: Time  # the clock of EventColumns.time_us


_TAG = "gpuprobe:"
_TAG_SEPARATOR = "\x1f"


def phase_tag(phase: str, module: str = "") -> str:
    """What to pass to ``torch.cuda.memory._set_memory_metadata`` so that the events that follow
    have this phase and module when the snapshot is read.
    """
    return f"{_TAG}{phase}{_TAG_SEPARATOR}{module}"


def parse_tag(metadata: str) -> tuple[str, str]:
    """(phase, module) of a torch trace entry's ``user_metadata``.

    Text that `phase_tag` did not make is the user's own, and taken as the phase.
    """
    if metadata.startswith(_TAG) and _TAG_SEPARATOR in metadata:
        phase, _, module = metadata[len(_TAG) :].partition(_TAG_SEPARATOR)
        return phase, module
    return metadata, ""


class WeaklyReferable:
    """A base of slotted dataclasses that others keep weak references to. Their own
    ``weakref_slot`` needs Python 3.11.
    """

    __slots__ = ("__weakref__",)


@record(frozen=True, slots=True)
class UsedLater:
    """Which blocks that were alive at the end of a trace are used in the ``steps`` after it: rows
    of its events, and of its baseline. ``ended``: the program has ended, without an error and not
    ended by gpuprobe; ``whole``: and the trace continues to its end; ``evaluated``: gpuprobe ended
    it where its next training step would have begun, after an evaluation for example. ``raised``:
    an exception, such as Ctrl-C, ended the program in the trace.
    """

    steps: int
    ended: bool
    whole: bool
    events: tuple[int, ...]
    baseline: tuple[int, ...]
    evaluated: bool = False
    raised: bool = False


@dataclass(slots=True)
class MemoryTrace(WeaklyReferable):
    """All that is known of one device's allocator over a stretch of time.

    ``baseline`` holds what was alive before the first event; ``segments`` is the layout after
    the last event (empty if it is unknown, as on the CPU). ``complete`` is False when
    events were lost (torch keeps a ring buffer of ``max_entries``): then nothing before the
    first kept event can be reconstructed from the events alone.
    """

    device: str  # "cuda:0", "cpu"
    events: EventColumns = field(default_factory=EventColumns)
    baseline: LiveColumns = field(default_factory=LiveColumns)
    stacks: StackTable = field(default_factory=StackTable)
    pools: list[tuple[int, int]] = field(default_factory=lambda: [(0, 0)])
    segments: tuple[Segment, ...] = ()
    settings: AllocatorSettings | None = None
    complete: bool = True
    step: int | None = None  # the training step, where the trace covers just one
    annotations: tuple[Annotation, ...] = ()  # in time order
    used_later: UsedLater | None = field(default=None, compare=False)
    """Of a recording in which uses are traced: what later steps used."""
    held: tuple[tuple[Holder, tuple[int, ...], tuple[int, ...]], ...] = field(
        default=(), compare=False
    )
    """What held blocks that were alive at its end, and not used later: a holder, and rows of the
    events and of the baseline."""
    lifetimes: object = field(default=None, compare=False, repr=False)
    """What `gpuprobe.analysis.trace.lifetimes` found of the events while they were being read."""
    accounts: dict[str, Any] | None = field(default=None, init=False, compare=False, repr=False)
    """What `gpuprobe.analysis.trace.ledger` made of the trace while it was being read."""
