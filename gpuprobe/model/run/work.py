"""What a step gives a GPU to do: each operator with its sizes, and the order of launches.

The recorder writes it, `gpuprobe.step_time` puts a price on it and plays it in time.
"""

from __future__ import annotations

import base64
import sys
import zlib
from array import array
from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Final

from gpuprobe.errors import DataError
from gpuprobe.model.record import record
from gpuprobe.model.values import AtMost, Count, Size, Unavailable

MOST_WORK: Final = 1_000_000
"""Entries that a recording has of one step. A step of a model of 8B parameters has 30,000."""

NOT_FOLLOWED: Final = Unavailable("not followed")
NO_SAMPLES: Final = Unavailable("no call of a model was followed")

MAIN: Final = "main thread"
AUTOGRAD: Final = "autograd's thread"
"""Threads of the host that have no name of the program's."""


class WorkKind(Enum):
    """What an operator computes, as far as the time of its kernels depends on it."""

    MATMUL = "matrix product"
    ATTENTION = "attention"
    ATTENTION_BACKWARD = "attention, backward"
    CONVOLUTION = "convolution"
    CONVOLUTION_BACKWARD = "convolution, backward"
    ELEMENTS = "elementwise"
    """Pointwise operators, reductions, normalisations, optimizers: bound by bytes."""
    INDEXED = "indexed"
    """Gathers, scatters, embeddings, sorts: bound by bytes that are not in order."""
    COMPILED = "compiled"
    """A kernel of Triton: of Inductor, or of the program."""
    COPY = "copy"
    COLLECTIVE = "collective"
    HOST = "on the host"
    """Operators on tensors of the CPU."""
    OTHER = "other"
    """Calls of libraries and kernels whose work is unknown: there is no price for it."""

    __hash__ = object.__hash__  # Enum's is a function in Python


@dataclass(frozen=True, slots=True)
class Work:
    """One kind of operator call.

    ``sizes`` is, by kind:

    * matrix product: batch, m, n, k of ``batch`` products (m, k) @ (k, n)
    * attention: batch, query heads, key heads, queries, keys, size of a query's head, of a value's
    * convolution: batch, input channels, output channels, output positions, kernel positions,
      groups
    * collective: ranks; in a job of several processes then the number of its group, which is the
      same in all of them, and the rank in it; of a send or receipt then the peer's rank, and the
      number of the batch (NCCL's group of calls) that it is in, 0 for none
    * elementwise: of a softmax and its backward pass the length of a row, of a scattered one the
      elements
    * anything else: empty

    ``variant``: of a matrix product the layouts of both factors, "N" if the last dimension is
    contiguous, else "T", as "NT"; of attention the implementation ("flash", "efficient", "cudnn",
    "math"), followed by " causal" where it is; of a convolution "channels last", "bias", or both;
    of a pointwise operator "pointwise", or "scattered" if its kernel accesses single elements; of a
    copy "h2d", "d2h", "d2d", "peer" and "pageable h2d", "pageable d2h", each followed by "
    sync" if the host waits; of a collective NCCL's name of it ("AllReduce").

    ``dtype`` is the type that is multiplied or moved, as torch names it ("bfloat16"); "tf32" for
    float32 that is multiplied in TF32. ``flops``: multiplications and additions, two for each pair;
    0 where bytes decide. ``read`` and ``written``: bytes, each once; of a collective ``read`` is
    its message.
    """

    operator: str
    kind: WorkKind
    dtype: str = ""
    sizes: Annotated[tuple[Count, ...], AtMost(8)] = ()
    variant: str = ""
    flops: Count = 0
    read: Size = 0
    written: Size = 0


class Action(Enum):
    """What the program did in a step, in the order in which it did so."""

    OPERATOR = 0
    """An operator, or a kernel of Triton, begins on the host."""
    KERNEL = 1
    """A launch, or a call of a library that launches: work of its operator."""
    COLLECTIVE = 2
    COPY = 3
    FILL = 4
    RECORD = 5
    """An event is recorded on a stream."""
    WAIT = 6
    """A stream waits for an event."""
    HOST_WAITS_EVENT = 7
    HOST_WAITS_STREAM = 8
    HOST_WAITS_DEVICE = 9
    GRAPH = 10
    """A CUDA graph is replayed: the entries of its nodes follow."""
    ALLOCATE = 11
    """cudaMalloc, cuMemMap and others; RELEASE: what they allocated is freed."""
    RELEASE = 12

    __hash__ = object.__hash__  # Enum's is a function in Python


@dataclass(frozen=True, slots=True)
class WorkPlace:
    """Where an operator was called. ``place`` is the text of a place; in the backward pass, place
    and module are those of the operator whose gradient is computed.
    """

    phase: str
    place: str
    module: str = ""


@record(frozen=True, slots=True)
class StepWork:
    """The work of one step. ``operators`` and ``entries`` are columns, packed by `pack`: of an
    operator the numbers of its work (0: none for the GPU, else one more than its index in
    ``works``) and of its place; of an entry the `Action`, the number of its stream, the operator
    that made it (one more than its index; 0 for none), and a value, which is the number of an
    event, or one more than the index in ``works`` of a copy, a fill or a collective.

    ``streams`` are named ``cuda:0/7``: device, and the number of the stream in the process.
    ``threads`` are the host's that made the calls (`MAIN`, `AUTOGRAD`, or the name that the program
    gave it), ``issued`` is a column, packed like those: of each entry the index of its thread;
    both are empty in recordings of versions that did not note them.
    ``complete``: every call is there. ``tokens``: indices of the largest embedding in the forward
    passes; ``images``: of those, the batches of the first convolution of up to 4 channels; 0 for
    none. ``samples``: rows of the first inputs of the model's calls.
    """

    works: Annotated[tuple[Work, ...], AtMost(MOST_WORK)] = ()
    places: Annotated[tuple[WorkPlace, ...], AtMost(MOST_WORK)] = ()
    streams: Annotated[tuple[str, ...], AtMost(65_536)] = ()
    operators: str = ""
    entries: str = ""
    complete: bool = True
    tokens: Count = 0
    images: Count = 0
    samples: Count | Unavailable = NO_SAMPLES
    threads: Annotated[tuple[str, ...], AtMost(65_536)] = ()
    issued: str = ""


_OPERATOR_COLUMNS: Final = "II"
_ENTRY_COLUMNS: Final = "BHIQ"
_TABLES: Final = {"operators": _OPERATOR_COLUMNS, "entries": _ENTRY_COLUMNS, "threads": "H"}


def pack(columns: tuple[array[int], ...]) -> str:
    """Columns of equal length as text: little-endian, zlib, base64."""
    raw = []
    for column in columns:
        if sys.byteorder == "big":  # pragma: no cover
            column = column[:]
            column.byteswap()
        raw.append(column.tobytes())
    return base64.b64encode(zlib.compress(b"".join(raw), 1)).decode()


def unpack(text: str, table: str) -> tuple[array[int], ...]:
    """The columns of `StepWork.operators`, ``entries`` or ``issued``: the ``table`` is "operators",
    "entries" or "threads".
    Raises DataError for a text that `pack` did not make, or with more than `MOST_WORK` rows.
    """
    codes = _TABLES[table]
    columns = tuple(array(code) for code in codes)
    width = sum(column.itemsize for column in columns)
    if not text:
        return columns
    try:
        inflate = zlib.decompressobj()
        raw = inflate.decompress(base64.b64decode(text, validate=True), MOST_WORK * width)
    except (ValueError, zlib.error) as error:
        raise DataError(f"the {table} of a step's work are damaged: {error}") from None
    if not inflate.eof or len(raw) % width:
        raise DataError(f"the {table} of a step's work are damaged, or too many")
    rows, at = len(raw) // width, 0
    for column in columns:
        column.frombytes(raw[at : at + rows * column.itemsize])
        if sys.byteorder == "big":  # pragma: no cover
            column.byteswap()
        at += rows * column.itemsize
    return columns


def check_work(work: StepWork | Unavailable) -> None:
    """Raises DataError for work whose columns do not belong together."""
    if isinstance(work, Unavailable):
        return
    kinds, places = unpack(work.operators, "operators")
    actions, streams, operators, values = unpack(work.entries, "entries")
    if max(kinds, default=0) > len(work.works) or max(places, default=-1) >= len(work.places):
        raise DataError("an operator's work or place is not listed")
    if max(actions, default=0) >= len(Action) or max(streams, default=-1) >= len(work.streams):
        raise DataError("an entry of a step's work is of an unknown kind or stream")
    if max(operators, default=0) > len(kinds):
        raise DataError("an entry of a step's work has an unknown operator")
    for action, value in zip(actions, values, strict=True):
        if action in _WITH_WORK and value > len(work.works):
            raise DataError("a copy or collective of a step is not listed")
    (threads,) = unpack(work.issued, "threads")
    if len(threads) not in (0, len(actions)) or max(threads, default=-1) >= len(work.threads):
        raise DataError("the threads of a step's calls are damaged")


_WITH_WORK: Final = frozenset((Action.COLLECTIVE.value, Action.COPY.value, Action.FILL.value))


def joined_work(
    earlier: StepWork | Unavailable, later: StepWork | Unavailable
) -> StepWork | Unavailable:
    """The work of two parts of one step; that of the part that has it, if only one has."""
    if isinstance(earlier, Unavailable):
        return later
    if isinstance(later, Unavailable):
        return earlier
    kinds, places = unpack(earlier.operators, "operators")
    entries = unpack(earlier.entries, "entries")
    streams = {name: at for at, name in enumerate(earlier.streams)}
    before = len(kinds)
    more_kinds, more_places = unpack(later.operators, "operators")
    kinds.extend(kind and kind + len(earlier.works) for kind in more_kinds)
    places.extend(place + len(earlier.places) for place in more_places)
    for action, stream, operator, value in zip(*unpack(later.entries, "entries"), strict=True):
        name = later.streams[stream]
        row = (
            action,
            streams.setdefault(name, len(streams)),
            operator and operator + before,
            value and value + len(earlier.works) if action in _WITH_WORK else value,
        )
        for column, item in zip(entries, row, strict=True):
            column.append(item)
    threads, issued = _joined_threads(earlier, later)
    return StepWork(
        works=(*earlier.works, *later.works),
        places=(*earlier.places, *later.places),
        streams=tuple(streams),
        operators=pack((kinds, places)),
        entries=pack(entries),
        complete=earlier.complete and later.complete,
        tokens=earlier.tokens + later.tokens,
        images=earlier.images + later.images,
        samples=_joined_samples(earlier.samples, later.samples),
        threads=threads,
        issued=issued,
    )


def _joined_threads(earlier: StepWork, later: StepWork) -> tuple[tuple[str, ...], str]:
    """The threads of both parts, and their column; empty if those of a part are unknown."""
    parts = earlier, later
    if any(part.entries and not part.issued for part in parts):
        return (), ""
    names = {name: at for at, name in enumerate(earlier.threads)}
    (issued,) = unpack(earlier.issued, "threads")
    (more,) = unpack(later.issued, "threads")
    issued.extend(names.setdefault(later.threads[thread], len(names)) for thread in more)
    return tuple(names), pack((issued,))


def _joined_samples(earlier: int | Unavailable, later: int | Unavailable) -> int | Unavailable:
    """The sum; that of one part, if the model was called in that one only."""
    if isinstance(earlier, Unavailable):
        return later if earlier == NO_SAMPLES else earlier
    if isinstance(later, Unavailable):
        return earlier if later == NO_SAMPLES else later
    return earlier + later
