"""Recordings packed into one Parquet file: written, and read like the directory they were made of.

A row for each line of each rank's stream, in order, and one for each trace chunk:

* ``rank``; ``record``: the type of the line (``step``, ``session``, …), ``header`` of the first
  line, ``torn`` of one without an end, ``other`` of damaged lines, ``trace`` of a chunk;
* of steps also ``step``, ``duration_ns``, ``full``, ``waited_ns``, ``phases`` (name to nanoseconds)
  and ``devices`` (of each: ``device``, ``peak_allocated``, ``peak_reserved``, ``end_allocated``;
  bytes), for queries;
* ``name`` of a chunk, and ``data``: the line or the chunk, byte for byte.

A row group has rows of one rank only. Compressed with Zstandard.
"""

from __future__ import annotations

import json
from array import array
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import IO, Any, Final

from gpuprobe.errors import DataError, MissingExtra, NotARecording, UnsupportedSchema
from gpuprobe.model.io.codec import from_plain, to_plain
from gpuprobe.model.io.files import gc_paused, open_regular, read_regular, stored_bytes
from gpuprobe.model.run.columns import MISSING, StepColumns
from gpuprobe.model.run.recording import ChildProcess, Recording
from gpuprobe.recording.budget import Limit
from gpuprobe.recording.files import CHUNK_NAME, MAX_CHUNK, MAX_STREAM, stream_name, stream_names
from gpuprobe.recording.many.children import MOST as MOST_CHILDREN
from gpuprobe.recording.many.children import read_children
from gpuprobe.recording.many.shapes import Shapes
from gpuprobe.recording.many.steps import ColumnParser, Kept, read_at

VERSION: Final = (1, 1)
"""(major, minor) of the columns and the metadata. History: 1.0: first version. 1.1: children."""

_KEY: Final = b"gpuprobe.packed"
"""Of the file's metadata: the version, the path that was packed, and what processes recorded that
the program started (`ChildProcess`), without their steps."""

_GROUP_BYTES: Final = 16 << 20
"""Of lines in a row group. One is decoded at a time."""

_MAX_GROUP: Final = MAX_CHUNK + 4 * _GROUP_BYTES
"""The most bytes of a row group that is decoded. Each chunk is a separate group."""


def _pyarrow() -> tuple[Any, Any]:
    try:
        import pyarrow  # 60 ms, only for packed recordings
        import pyarrow.parquet
    except ImportError as error:
        raise MissingExtra("pyarrow", "fleet", why="packed recordings") from error
    return pyarrow, pyarrow.parquet


# -- writing


def write_packed(directory: Path, stream: IO[bytes], shown: str) -> int:
    """Pack the recording in ``directory``; return how many ranks it has. ``shown`` is its path as
    reports show it.

    Raises MissingExtra without pyarrow, NotARecording and what reading the recording raises.
    """
    arrow, parquet = _pyarrow()
    try:
        names = stream_names(directory)
        if not names:
            raise NotARecording(f"{directory} is not a recording: no rank's stream in it")
        chunks: dict[int, list[str]] = {}
        for entry in sorted(entry.name for entry in directory.iterdir()):
            found = CHUNK_NAME.fullmatch(entry)
            if found:
                chunks.setdefault(int(found[1]), []).append(entry)
        children = [to_plain(child) for child in read_children(directory)]
        about = json.dumps({"version": VERSION, "path": shown, "children": children})
        schema = _schema(arrow).with_metadata({_KEY: about.encode()})
        shapes = Shapes()
        kept: Kept = OrderedDict()
        with parquet.ParquetWriter(stream, schema, compression="zstd") as writer:
            for rank, name in names.items():
                parser = ColumnParser(name, shapes, kept, partial(read_at, directory / name))
                for rows in _lines_of(directory / name, parser, rank):
                    writer.write_table(arrow.Table.from_pydict(rows, schema=schema))
                for chunk in chunks.get(rank, ()):
                    data = read_regular(directory / chunk, most=MAX_CHUNK, inside=True)
                    rows = _blank(1) | {"rank": [rank], "record": ["trace"]}
                    rows |= {"name": [chunk], "data": [data]}
                    writer.write_table(arrow.Table.from_pydict(rows, schema=schema))
    except NotADirectoryError as error:
        raise NotARecording(f"{directory} is not a recording: not a directory") from error
    except OSError as error:
        raise DataError(
            f"cannot read the recording {directory}: {error.strerror or error}"
        ) from error
    return len(names)


def _schema(arrow: Any) -> Any:
    whole = arrow.int64()
    device = arrow.struct(
        [
            ("device", arrow.string()),
            ("peak_allocated", whole),
            ("peak_reserved", whole),
            ("end_allocated", whole),
        ]
    )
    return arrow.schema(
        [
            ("rank", arrow.int32()),
            ("record", arrow.string()),
            ("step", whole),
            ("duration_ns", whole),
            ("full", arrow.bool_()),
            ("waited_ns", whole),
            ("phases", arrow.map_(arrow.string(), whole)),
            ("devices", arrow.list_(device)),
            ("name", arrow.string()),
            ("data", arrow.binary()),
        ]
    )


_OF_STEPS: Final = ("step", "duration_ns", "full", "waited_ns", "phases", "devices")


def _blank(count: int) -> dict[str, list[object]]:
    return {name: [None] * count for name in (*_OF_STEPS, "name")}


def _lines_of(path: Path, parser: ColumnParser, rank: int) -> Iterator[dict[str, Any]]:
    """Row groups of a stream: its lines, parsed as they are read."""
    with open_regular(path, inside=True) as file, gc_paused():
        at = 0
        first = True
        while lines := file.readlines(_GROUP_BYTES):
            for line in lines:
                parser.feed(line)
            rows = _rows(lines, parser, rank, at)
            if first:
                rows["record"][0] = "header"
                first = False
            at += sum(map(len, lines))
            yield rows


def _rows(lines: Sequence[bytes], parser: ColumnParser, rank: int, at: int) -> dict[str, Any]:
    columns, row_at = parser.line_rows()
    rows: dict[str, list[Any]] = _blank(len(lines))
    rows["rank"] = [rank] * len(lines)
    rows["record"] = []
    rows["data"] = []
    figures = _Figures(columns)
    for place, line in enumerate(lines):
        row = row_at.get(at)
        at += len(line)
        if row is not None:
            for name, value in zip(_OF_STEPS, figures.of(row), strict=True):
                rows[name][place] = value
        torn = not line.endswith(b"\n")
        rows["record"].append("torn" if torn else "step" if row is not None else _type_of(line))
        rows["data"].append(line if torn else line[:-1])
    return rows


def _type_of(line: bytes) -> str:
    try:
        found = json.loads(line)["type"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return "other"
    known = ("environment", "session", "finding", "blind_spot", "gap", "end")
    return found if found in known else "other"


class _Figures:
    """The columns of a rank's steps, for queries."""

    def __init__(self, columns: StepColumns) -> None:
        self._simple = [
            columns.number("index"),
            columns.number("duration_ns"),
            columns.mark("full"),
            columns.number("waited_ns"),
        ]
        self._phases = [(name, columns.number("phase", name)) for name in columns.phases]
        names = ("allocated_least", "reserved_least", "end_allocated")
        self._devices = [
            (device, columns.mark("window", device), [columns.number(n, device) for n in names])
            for device in columns.devices
        ]

    def of(self, row: int) -> tuple[object, ...]:
        index, duration, full, waited = (column[row] for column in self._simple)
        phases = [(name, column[row]) for name, column in self._phases if column[row] != MISSING]
        devices = []
        for device, here, columns in self._devices:
            if here[row]:
                values = (_known(column, row) for column in columns)
                keys = ("peak_allocated", "peak_reserved", "end_allocated")
                devices.append({"device": device, **dict(zip(keys, values, strict=True))})
        return index, duration, bool(full), waited, phases, devices


def _known(column: array[int], row: int) -> int | None:
    return None if column[row] == MISSING else column[row]


# -- reading

_UNPACKED: Final = Limit(256 << 20, 512)
_ROWS: Final = Limit(1_000_000, 1)
"""Bytes that a packed file may unpack to, and its rows. Measured: 100 times the file for 20,000
steps that differ in their times only, 180 times for equal ones, and 20 bytes for a row. Values that
repeat are stored once, so that a file of 20 KB could have thousands of a megabyte each."""

_TEXTS: Final = ("record", "name", "data")


class PackedFile:
    """A packed recording that is open."""

    def __init__(self, path: Path) -> None:
        """Raises MissingExtra, NotARecording, UnsupportedSchema or DataError."""
        arrow, parquet = _pyarrow()
        self.path = path
        self._errors = (arrow.ArrowException, OSError, ValueError)
        try:
            with open_regular(path) as file:  # raises for what is not a file
                size = stored_bytes(file.fileno())
            metadata = parquet.read_metadata(path)
            about = (metadata.metadata or {}).get(_KEY)
            if about is not None:
                # Not unpacked until it is known how much that is.
                self._file = parquet.ParquetFile(path, read_dictionary=[*_TEXTS])
        except (*self._errors, KeyError) as error:
            raise DataError(f"{path}: the packed recording is damaged ({error})") from error
        if about is None:
            raise NotARecording(
                f"{path} is a Parquet file without a recording",
                hint="gpuprobe pack writes recordings to Parquet files",
            )
        try:
            plain = json.loads(about)
            major, self.shown = plain["version"][0], str(plain["path"])
            children = plain.get("children", [])[:MOST_CHILDREN]
            self._children = tuple(from_plain(ChildProcess, one) for one in children)
        except (DataError, ValueError, TypeError, KeyError, IndexError) as error:
            raise DataError(f"{path}: the packed recording is damaged (metadata)") from error
        if not isinstance(major, int) or major > VERSION[0]:
            raise UnsupportedSchema(
                f"{path}: packed by a newer gpuprobe", hint="pip install -U gpuprobe"
            )
        groups = (metadata.row_group(at) for at in range(metadata.num_row_groups))
        self._left = _UNPACKED.of(size)
        if (
            metadata.num_rows > _ROWS.of(size)
            or sum(group.total_byte_size for group in groups) > self._left
        ):
            raise self._too_much()
        self._counted: set[int] = set()  # row groups
        self._starts: dict[int, list[tuple[int, int]]] = {}  # rank: (offset, row group)
        self._chunk_groups: dict[str, int] = {}
        self._open: tuple[int, list[bytes], list[int]] | None = None

    def recording(self) -> Recording:
        """Parse all streams. Raises DataError, and what parsing streams raises."""
        from gpuprobe.recording.reader import Chunks, assembled

        shapes, kept = Shapes(), Kept()
        parsers: dict[int, ColumnParser] = {}
        sizes: dict[int, int] = {}
        with gc_paused():
            for group in range(self._file.num_row_groups):
                rank, records, names, lines = self._group(group)
                if "trace" in records:
                    self._chunk_groups[str(names[0])] = group
                    continue
                parser = parsers.get(rank)
                if parser is None:
                    read = partial(self._bytes_at, rank)
                    parser = ColumnParser(stream_name(rank), shapes, kept, read)
                    parsers[rank] = parser
                at = sizes.get(rank, 0)
                self._starts.setdefault(rank, []).append((at, group))
                torn = bool(records) and records[-1] == "torn"
                data = b"\n".join(lines) + (b"" if torn else b"\n")
                sizes[rank] = at + len(data)
                if sizes[rank] > MAX_STREAM:
                    raise DataError(f"{self.path}: the stream of rank {rank} is too large")
                parser.feed(data)
        recording = assembled(self.shown, parsers, Chunks(self.path, self._chunk))
        if not recording.ranks:
            raise DataError(f"the packed recording {self.path} is empty")
        recording.load_children = lambda: self._children
        return recording

    def _too_much(self) -> DataError:
        return DataError(f"{self.path}: it unpacks to far more than a file of its size holds")

    def _unpacked(self, group: int, table: Any) -> dict[str, list[Any]]:
        """The columns of a row group, whose texts refer to a dictionary of the different ones."""
        arrow, _ = _pyarrow()
        import pyarrow.compute as compute  # 40 ms, only for packed recordings

        if group not in self._counted:
            self._counted.add(group)
            for name in _TEXTS:
                for part in table[name].chunks:
                    if not arrow.types.is_dictionary(part.type):
                        raise ValueError(f"{name} is not text")
                    lengths = compute.binary_length(part.dictionary)
                    self._left -= compute.sum(lengths.take(part.indices)).as_py() or 0
            if self._left < 0:
                raise self._too_much()
        types = {"record": arrow.string(), "name": arrow.string(), "data": arrow.binary()}
        found: dict[str, list[object]] = {"rank": table["rank"].to_pylist()}
        for name in _TEXTS:
            found[name] = table[name].cast(types[name]).to_pylist()
        return found

    def _group(self, group: int) -> tuple[int, list[str], list[str | None], list[bytes]]:
        """The rank, and the columns, of a row group."""
        try:
            if self._file.metadata.row_group(group).total_byte_size > _MAX_GROUP:
                raise ValueError("a row group that is too large")
            names = ["rank", *_TEXTS]
            table = self._unpacked(group, self._file.read_row_group(group, columns=names))
            ranks = set(table["rank"])
            if len(ranks) != 1:
                raise ValueError("a row group of several ranks")
            lines = table["data"]
            (rank,) = ranks
            if None in lines or rank is None or rank < 0:
                raise ValueError("a row without data")
        except (*self._errors, KeyError) as error:
            raise DataError(f"{self.path}: the packed recording is damaged ({error})") from error
        return rank, table["record"], table["name"], lines

    def _bytes_at(self, rank: int, start: int, length: int) -> bytes:
        groups = self._starts[rank]
        offset, group = groups[bisect_right(groups, (start, 1 << 62)) - 1]
        if self._open is None or self._open[0] != group:
            lines = self._group(group)[3]
            starts = []
            at = offset
            for line in lines:
                starts.append(at)
                at += len(line) + 1
            self._open = (group, lines, starts)
        _, lines, starts = self._open
        return lines[bisect_right(starts, start) - 1][:length]

    def _chunk(self, name: str) -> bytes:
        group = self._chunk_groups.get(name)
        if group is None:
            raise FileNotFoundError(2, "No such file or directory", name)
        return self._group(group)[3][0]
