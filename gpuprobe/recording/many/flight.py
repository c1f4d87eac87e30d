"""Dumps of torch's Flight Recorder, read without executing them.

One file for each rank, whose name ends with the rank: so ``TORCH_NCCL_DUMP_ON_TIMEOUT`` writes them
and torch/distributed/flight_recorder/components/loader.py reads them. A dump is a pickle of plain
data (torch/csrc/distributed/c10d/FlightRecorder.hpp). It is read as memory snapshots are: in a
separate process with limits, in which no names are resolved.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import field
from math import prod
from pathlib import Path
from typing import Annotated, Final, NamedTuple, NoReturn

from gpuprobe.errors import DataError, InternalError, NotARecording, SnapshotError, UsageError
from gpuprobe.model.io.codec import from_plain
from gpuprobe.model.io.files import open_regular, stored_bytes
from gpuprobe.model.place import NoPlace, Place, SourceLine
from gpuprobe.model.record import record
from gpuprobe.model.run.communication import CollectiveRecord, group_text, wire_bytes
from gpuprobe.model.run.jobs import UnreadableDump
from gpuprobe.model.trace import Frame
from gpuprobe.model.values import Bounds, Bytes, Count, LineNumber, Unavailable
from gpuprobe.recording.snapshot.child import DUMP, command_of
from gpuprobe.recording.snapshot.limits import limit_process
from gpuprobe.recording.snapshot.pickles import load_plain
from gpuprobe.user_frames import is_user_frame

HINT: Final = "a directory with a dump of each rank: see TORCH_NCCL_DUMP_ON_TIMEOUT"

_RANK: Final = re.compile(r"([0-9]{1,6})(\.(pickle|pkl))?$")

_MOST_DUMP: Final = 1 << 30
"""Bytes of a dump. An entry with its stack takes a few KB, and the recorder keeps thousands."""

_UnixTime = Annotated[int, Bounds(0, (1 << 63) - 1)]

_MOST_FILES: Final = 65_536


@record(frozen=True)
class _Frame:
    """A frame of a stack; the innermost comes first."""

    name: str = ""
    filename: str = ""
    line: LineNumber = 0


@record(frozen=True)
class _Entry:
    """One operation that a rank called. Times are nanoseconds since the Unix epoch."""

    profiling_name: str
    process_group: tuple[str, str]  # name and description
    state: str = ""
    collective_seq_id: Count = 0
    is_p2p: bool = False
    input_sizes: tuple[tuple[int, ...], ...] = ()
    input_dtypes: tuple[str, ...] = ()
    time_created_ns: _UnixTime | None = None
    time_discovered_completed_ns: _UnixTime | None = None
    frames: tuple[_Frame, ...] = ()


@record(frozen=True)
class _Group:
    """A process group: ``ranks`` is a list as text, such as ``[0, 1]``."""

    name: str = ""
    desc: str = ""
    ranks: str = ""


@record(frozen=True)
class _Dump:
    """What one rank dumped."""

    entries: tuple[_Entry, ...] = ()
    pg_config: dict[str, _Group] = field(default_factory=dict)


class Dumps(NamedTuple):
    """The dumps in a directory: what each rank ``called``, in its order; the names of files that
    are not dumps; dumps that cannot be read.
    """

    called: dict[int, list[CollectiveRecord]]
    skipped: tuple[str, ...]
    unreadable: tuple[UnreadableDump, ...]


def read_dumps(directory: Path) -> Dumps:
    """Read the dumps in a directory. A rank that ended while it wrote its dump leaves its
    beginning: that dump is listed, and the others are read.

    Raises UsageError if there is no such directory, NotARecording if it has no dump, DataError if
    none can be read.
    """
    found: dict[int, _Dump] = {}
    skipped: list[str] = []
    failures: dict[int, DataError] = {}
    try:
        names = sorted(entry.name for entry in directory.iterdir() if not entry.is_dir())
        if len(names) > _MOST_FILES:
            raise DataError(f"{directory} has more than {_MOST_FILES} files", hint=HINT)
        for name in names:
            rank = _RANK.search(name)
            if rank is None:
                skipped.append(name)
                continue
            number = int(rank[1])
            try:
                plain = _read(directory / name)
                dump = None if plain is None else from_plain(_Dump, plain, f"{directory / name}")
            except DataError as error:
                failures[number] = error
                continue
            if dump is None:
                skipped.append(name)
                continue
            if number in found:
                raise DataError(f"{directory} has two dumps of rank {number}", hint=HINT)
            found[number] = dump
    except FileNotFoundError as error:
        raise UsageError(f"no such directory: {directory}", hint=HINT) from error
    except NotADirectoryError as error:
        raise UsageError(f"{directory} is a file, not a directory", hint=HINT) from error
    except OSError as error:
        raise DataError(f"cannot read {directory}: {error.strerror or error}") from error
    if not found and failures:
        raise next(iter(failures.values()))
    if not found:
        raise NotARecording(f"{directory} has no Flight Recorder dump", hint=HINT)
    groups = {
        (name, group.desc): group.ranks
        for dump in found.values()
        for name, group in dump.pg_config.items()
    }
    records = {
        rank: [_record(entry, groups) for entry in dump.entries] for rank, dump in found.items()
    }
    unreadable = tuple(
        UnreadableDump(rank, str(error)) for rank, error in failures.items() if rank not in found
    )
    return Dumps(records, tuple(skipped), unreadable)


_KINDS: Final = {
    "_all_gather_base": "all_gather",
    "_reduce_scatter_base": "reduce_scatter",
    "all_gather": "all_gather",
    "all_gather_into_tensor_coalesced": "all_gather",
    "all_reduce": "all_reduce",
    "all_reduce_barrier": "barrier",
    "all_to_all": "all_to_all",
    "alltoall_base": "all_to_all",
    "allgather_coalesced": "all_gather",
    "allreduce_coalesced": "all_reduce",
    "barrier": "barrier",
    "broadcast": "broadcast",
    "gather": "gather",
    "recv": "recv",
    "reduce": "reduce",
    "reduce_scatter": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter",
    "scatter": "scatter",
    "send": "send",
}
"""The operations of `wire_bytes`, by what backends call them (torch/csrc/distributed/c10d:
ProcessGroupNCCL.cpp, ProcessGroupGloo.cpp). Others send an unknown number of bytes: 0."""

_DTYPES: Final = {
    "Bool": ("bool", 1),
    "Byte": ("uint8", 1),
    "Char": ("int8", 1),
    "Short": ("int16", 2),
    "Int": ("int32", 4),
    "Long": ("int64", 8),
    "Half": ("float16", 2),
    "BFloat16": ("bfloat16", 2),
    "Float": ("float32", 4),
    "Double": ("float64", 8),
    "ComplexHalf": ("complex32", 4),
    "ComplexFloat": ("complex64", 8),
    "ComplexDouble": ("complex128", 16),
    "Float8_e4m3fn": ("float8_e4m3fn", 1),
    "Float8_e4m3fnuz": ("float8_e4m3fnuz", 1),
    "Float8_e5m2": ("float8_e5m2", 1),
    "Float8_e5m2fnuz": ("float8_e5m2fnuz", 1),
    "UInt16": ("uint16", 2),
    "UInt32": ("uint32", 4),
    "UInt64": ("uint64", 8),
}
"""torch's name and the bytes of an element, by the name that C++ prints (c10/core/ScalarType.h)."""

_MESH: Final = "mesh_"
_MOST_BYTES: Final = 1 << 60
_PEER: Final = re.compile(r"(?:send|recv) \d+(?:->|<-)(\d{1,6})$")


def _record(entry: _Entry, groups: Mapping[tuple[str, str], str]) -> CollectiveRecord:
    name, described = entry.process_group
    # gloo's groups have neither name nor description (torch 2.13).
    known = (groups.get(key) for key in ((name, described), ("", described), ("", "")))
    ranks = _ranks(next(filter(None, known), ""))
    function = entry.profiling_name.rpartition(":")[2]
    peer = _PEER.search(function)
    op = _KINDS.get(function.partition(" ")[0], "send" if entry.is_p2p else function)
    size = max(1, len(ranks))
    payload = _bytes(entry) * (size if op in ("all_gather", "gather") else 1)
    created, completed = entry.time_created_ns, entry.time_discovered_completed_ns
    return CollectiveRecord(
        group=name,
        axis=described.removeprefix(_MESH) if described.startswith(_MESH) else "",
        ranks=size,
        sequence=entry.collective_seq_id,
        op=op,
        dtype=" ".join(dict.fromkeys(_DTYPES.get(t, (t, 0))[0] for t in entry.input_dtypes)),
        payload=Bytes(payload),
        wire=wire_bytes(op, payload, size) if op in _KINDS.values() else Bytes(0),
        place=_place(entry),
        arrival_ns=Unavailable("not in the dump") if created is None else created,
        completion_ns=Unavailable("not in the dump") if completed is None else completed,
        members=group_text(ranks) if ranks else "",
        peer=Unavailable("not a send or receive") if peer is None else int(peer[1]),
        described=described,
        function=entry.profiling_name,
        shapes=_shapes(entry),
        state=entry.state,
    )


def _shapes(entry: _Entry) -> str:
    sizes = " ".join("x".join(map(str, size)) or "scalar" for size in entry.input_sizes[:3])
    more = " …" if len(entry.input_sizes) > 3 else ""
    types = " ".join(dict.fromkeys(entry.input_dtypes))
    return " ".join(part for part in (sizes + more, types) if part)


def _bytes(entry: _Entry) -> int:
    """Of what the rank passes; 0 for types that are unknown."""
    total = 0
    for sizes, dtype in zip(entry.input_sizes, entry.input_dtypes, strict=False):
        total += max(0, prod(sizes)) * _DTYPES.get(dtype, ("", 0))[1]
        if total > _MOST_BYTES:
            raise DataError(f"an operation about more than {_MOST_BYTES:,} bytes", hint=HINT)
    return total


def _ranks(text: str) -> list[int]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return []
    if not isinstance(found, list):
        return []
    return sorted({rank for rank in found if isinstance(rank, int) and rank >= 0})


def _place(entry: _Entry) -> SourceLine:
    """The innermost line of the program; of no program, the innermost line."""
    frames = [Frame(f.filename, f.line, f.name) for f in entry.frames]
    frame = next((f for f in frames if is_user_frame(f)), frames[0] if frames else None)
    return NoPlace.UNKNOWN if frame is None else Place(frame.filename, frame.line, frame.name)


def _read(path: Path) -> dict[str, object] | None:
    """A dump as plain data; None for a file that is not one. Raises OSError and DataError."""
    with open_regular(path, inside=True) as stream:
        first = stream.peek(1)[:1]  # type: ignore[attr-defined]
        if not first:
            raise DataError(f"{path} is empty")
        if first != b"\x80":
            return None
        size = os.fstat(stream.fileno()).st_size
        if size > _MOST_DUMP:
            raise DataError(f"{path}: a dump of {size} bytes is too large")
        size = stored_bytes(stream.fileno())  # what was peeked at is read again
        try:
            child = subprocess.run(
                command_of(DUMP, size), stdin=stream, capture_output=True, check=False
            )
        except OSError as error:
            raise InternalError(f"cannot start a process to read {path}: {error}") from error
    if child.returncode:
        raise DataError(
            f"{path}: reading it crashed or exceeded its limits: torch did not write it",
            hint="do not unpickle this file",
        )
    try:
        answer = json.loads(child.stdout)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: not a Flight Recorder dump") from error
    if "error" in answer:
        raise DataError(f"{path}: {answer['error']}", hint=HINT)
    found = answer["dump"]
    return found if isinstance(found, dict) and "entries" in found else None


def _with_places(plain: dict[str, object]) -> dict[str, object]:
    """The dump with one frame of each stack, the one that `_place` chooses. torch shares frames
    between stacks, so that written out they would take a hundred times the dump's size.
    """
    entries = plain.get("entries")
    if not isinstance(entries, list):
        return plain
    chosen: dict[int, object] = {}  # by the id of the list of frames

    def place(frames: object) -> object:
        if not isinstance(frames, (list, tuple)):
            return frames
        found = chosen.get(id(frames))
        if found is None:
            # What is not a frame is kept: it is refused where it is decoded.
            one = next(filter(_is_users, frames), frames[0] if frames else None)
            found = chosen[id(frames)] = [] if one is None else [one]
        return found

    with_frames = [
        {**entry, "frames": place(entry["frames"])}
        if isinstance(entry, dict) and "frames" in entry
        else entry
        for entry in entries
    ]
    return {**plain, "entries": with_frames}


_EMPTY_FRAME: Final = (("filename", ""), ("line", 0), ("name", ""))


def _is_users(plain: object) -> bool:
    """Whether it is a frame of the program, or not a frame at all."""
    if not isinstance(plain, dict):
        return True
    filename, line, name = (plain.get(key, empty) for key, empty in _EMPTY_FRAME)
    if not isinstance(filename, str) or not isinstance(line, int) or not isinstance(name, str):
        return True
    return is_user_frame(Frame(filename, line, name))


_FREE_VALUES: Final = 1 << 20
_FREE_TEXT: Final = 16 << 20
_TEXT_PER_BYTE: Final = 16
"""Values that a dump may have when it is written out, with one for each of its bytes, and their
characters. Its keys are what it repeats: an entry of 250 bytes has 30 values in 700 characters."""


def _refuse_repetition(plain: object, size: int) -> None:
    """Raise SnapshotError for a dump of ``size`` bytes that refers to the same parts so often that
    it would be far larger when it is written out. RecursionError for parts that contain themselves.
    """
    sizes: dict[int, tuple[int, int]] = {}  # by the id of a part: its values and characters

    def written(value: object) -> tuple[int, int]:
        if isinstance(value, str):
            return 1, len(value)
        if isinstance(value, int):
            return 1, value.bit_length() // 3
        if not isinstance(value, (dict, list, tuple)):
            return 1, 4
        found = sizes.get(id(value))
        if found is None:
            parts = [written(part) for part in value]
            if isinstance(value, dict):
                parts += [written(part) for part in value.values()]
            values, characters = (sum(column) for column in zip((1, 2), *parts, strict=True))
            found = sizes[id(value)] = values, characters
        return found

    values, characters = written(plain)
    if values > _FREE_VALUES + size or characters > _FREE_TEXT + _TEXT_PER_BYTE * size:
        raise SnapshotError(
            "the dump repeats the same entries so often that it describes more than a file of its "
            "size can hold"
        )


def read_stdin(size: int) -> NoReturn:
    """Read a dump, in the process for that: JSON on stdout."""
    limit_process(size)
    try:
        with open(0, "rb", buffering=1 << 16, closefd=False) as stream:
            found = load_plain(stream, size)
        kept = None
        if isinstance(found, Mapping):
            kept = {key: found[key] for key in ("entries", "pg_config") if key in found}
            kept = _with_places(kept)
            _refuse_repetition(kept, size)
        answer = json.dumps({"dump": kept})
    except SnapshotError as error:
        answer = json.dumps({"error": str(error)})
    except (TypeError, ValueError, RecursionError):
        answer = json.dumps({"error": "not a Flight Recorder dump"})
    sys.stdout.write(answer)
    sys.stdout.flush()
    os._exit(0)
