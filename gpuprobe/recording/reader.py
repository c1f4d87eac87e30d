"""Reading a recording, finished or still being written.

Files are opened, read and closed at every poll, never mapped or kept open: what another machine
wrote is visible on a network file system once the file is opened again (close-to-open consistency).
"""

from __future__ import annotations

import os
import stat
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Generic, TypeVar

from gpuprobe.errors import DataError, NotARecording
from gpuprobe.model.io.files import gc_paused, open_regular, read_regular, refuse_holes
from gpuprobe.model.run.recording import SCHEMA_VERSION, Recording
from gpuprobe.model.run.session import BlindSpot
from gpuprobe.model.trace import Frame
from gpuprobe.model.values import ReadStatus, Unavailable
from gpuprobe.recording.chunks import Chunks
from gpuprobe.recording.files import MAX_CHUNK, MAX_STREAM, stream_names
from gpuprobe.recording.many.shapes import Shapes
from gpuprobe.recording.many.steps import ColumnParser, Kept, read_at
from gpuprobe.recording.stream import StreamParser

_PIECE = 1 << 20

LARGE = 16 << 20
"""Bytes of a recording's streams from which its steps are read in columns: some 6,000 steps. Fewer
are decoded in a second, and take 60 MB."""

_HINT = "a recording is a directory written by 'gpuprobe run' or gpuprobe.record(...)"


def read_recording(path: Path) -> Recording:
    """Read the recording in the directory ``path`` as it is now. Traces are read on demand.

    Raises NotARecording, UnsupportedSchema, or DataError if no part of it can be read.
    """
    recording = RecordingTail(path, columns=None).poll()
    if not recording.ranks:
        raise DataError(
            f"the recording {path} is empty: it has no session record",
            hint="its writer was stopped while starting, or could not write; record again",
        )
    return recording


class RecordingTail:
    """Follows a recording that may still be written; each `poll` parses only what is new."""

    def __init__(self, path: Path, *, columns: bool | None = False) -> None:
        """``columns``: steps are kept as columns, and decoded when they are used; None: if the
        recording is large at the first `poll` (`LARGE`).
        """
        self.path = Path(path)
        self._columns = columns
        self._shapes = Shapes()
        self._kept: Kept = OrderedDict()
        self._streams: dict[int, StreamFile[StreamParser]] = {}
        self._inodes: dict[tuple[int, int], int] = {}  # rank, by its stream's device and inode
        self._chunks = Chunks(self.path, partial(_read_chunk, self.path))

    def poll(self) -> Recording:
        """The recording as it is now.

        A rank is in it from the moment its session is on disk, so there may be none yet.
        Raises NotARecording where the directory holds no recording (any more), and what
        `read_recording` raises.
        """
        try:
            names = stream_names(self.path)
            if not names:
                raise self._nothing()
            for rank in self._streams.keys() - names.keys():
                del self._streams[rank]
                self._inodes = {at: other for at, other in self._inodes.items() if other != rank}
            if self._columns is None:
                self._columns = _size(self.path, names.values()) > LARGE
            for rank, name in names.items():
                stream = self._streams.get(rank)
                if stream is None:
                    self._refuse_twice(rank, name)
                    stream = self._streams[rank] = StreamFile(self.path / name, self._parser)
                with gc_paused():
                    stream.read_on()
        except FileNotFoundError as error:
            raise self._nothing() from error
        except NotADirectoryError as error:
            raise NotARecording(f"{self.path} is not a recording: not a directory") from error
        except OSError as error:
            raise DataError(
                f"cannot read the recording {self.path}: {error.strerror or error}"
            ) from error
        parsers = {rank: stream.parser for rank, stream in self._streams.items()}
        return assembled(str(self.path), parsers, self._chunks)

    def _refuse_twice(self, rank: int, name: str) -> None:
        """Raise DataError for a link to another rank's stream: a large one under thousands of
        names would be read as often. Raises OSError.
        """
        status = (self.path / name).stat()
        if status.st_ino and self._inodes.setdefault((status.st_dev, status.st_ino), rank) != rank:
            raise DataError(f"{name} of {self.path} is a link to the stream of another rank")

    def _parser(self, name: str) -> StreamParser:
        if self._columns:
            read = partial(read_at, self.path / name)
            return ColumnParser(name, self._shapes, self._kept, read)
        return StreamParser(name)

    def _nothing(self) -> NotARecording:
        if self._streams:
            return NotARecording(
                f"the recording {self.path} was removed", hint="it existed when reading began"
            )
        if not self.path.is_dir():
            return NotARecording(f"no such recording: {self.path}", hint=_HINT)
        return NotARecording(f"{self.path} is not a recording: no rank's stream in it", hint=_HINT)


def assembled(path: str, parsers: Mapping[int, StreamParser], chunks: Chunks) -> Recording:
    """The recording of all ranks whose session was read."""
    headers = [parser.header for parser in parsers.values() if parser.header is not None]
    version = max((header.version for header in headers), default=SCHEMA_VERSION)
    readable = [rank for rank in sorted(parsers) if parsers[rank].session is not None]
    return Recording(
        path,
        version,
        tuple(
            parsers[rank].result(
                chunks.load,
                _missing_ranks(readable, parsers) if rank == readable[0] else (),
            )
            for rank in readable
        ),
    )


def _missing_ranks(
    readable: list[int], parsers: Mapping[int, StreamParser]
) -> tuple[BlindSpot, ...]:
    """What is reported if the recording has fewer ranks than its program had."""
    headers = [parsers[rank].header for rank in readable]
    world = max((h.world_size for h in headers if h is not None), default=1)
    absent = world - len(readable)
    if absent <= 0:
        return ()
    some = [str(rank) for rank in range(min(world, len(readable) + 5)) if rank not in readable]
    names = ", ".join(some[:4]) + (", …" if absent > 4 else "")
    return (
        BlindSpot(
            f"{absent} of {world} ranks left no records (rank {names})",
            "their memory is not included",
        ),
    )


_P = TypeVar("_P", bound=StreamParser)


class StreamFile(Generic[_P]):
    """A stream's file, and how far it was read. ``make`` makes the parser of its bytes."""

    def __init__(self, path: Path, make: Callable[[str], _P]) -> None:
        self._path = path
        self._make = make
        self._offset = 0
        self._inode = -1
        self.parser = make(path.name)
        self.at_end = False

    def read_on(self, most: int | None = None) -> int:
        """Parse what was appended, in pieces, until ``most`` bytes are reached; return how many
        it were. Raises OSError, and what `StreamParser.feed` raises.
        """
        read = 0
        with open_regular(self._path, inside=True) as file:
            status = os.fstat(file.fileno())
            if status.st_size > MAX_STREAM:
                raise DataError(
                    f"{self._path.name}: a stream of {status.st_size} bytes is too large: the "
                    f"limit is {MAX_STREAM >> 30} GiB"
                )
            if status.st_size < self._offset or self._inode not in (-1, status.st_ino):
                # Replaced by a new recording (--force): begin again.
                self._offset = 0
                self.parser = self._make(self._path.name)
            self._inode = status.st_ino
            if status.st_size > self._offset:
                refuse_holes(file)
            file.seek(self._offset)
            while most is None or read < most:
                data = file.read(_PIECE)
                if not data:
                    break
                read += len(data)
                self._offset += len(data)
                try:
                    self.parser.feed(data)
                except DataError:
                    # An error is raised at every poll, not only at the first.
                    self._offset, self.parser = 0, self._make(self._path.name)
                    raise
            self.at_end = self._offset >= os.fstat(file.fileno()).st_size
        return read


def _size(directory: Path, names: Iterable[str]) -> int:
    """Of all these files. Bytes."""
    return sum((directory / name).stat().st_size for name in names)


def _read_chunk(directory: Path, name: str) -> bytes:
    return read_regular(directory / name, most=MAX_CHUNK, inside=True)


_MOST_SOURCE = 4 << 20
"""Bytes of a source file that are read at most."""


@dataclass(frozen=True, slots=True)
class Excerpt:
    """Lines of a source file around ``line``: (number, text). ``changed``: the file is newer
    than the recording, so the text may not be what ran.
    """

    path: str
    line: int
    lines: tuple[tuple[int, str], ...]
    changed: bool


def excerpt(
    frame: Frame, *, cwd: str = "", since: float = 0.0, around: int = 3
) -> Excerpt | Unavailable:
    """The source of a frame, read now from this machine's disk. ``cwd`` is where relative names
    begin, ``since`` when the recording was made (seconds since the Unix epoch, 0: unknown).

    Recordings come from anywhere, so only a regular file named ``.py`` is read, and only the
    requested lines are kept.
    """
    path = Path(frame.filename)
    if not frame.filename.endswith(".py"):
        return Unavailable("not a Python file", ReadStatus.UNSUPPORTED)
    if not path.is_absolute():
        path = Path(cwd) / path
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode) or status.st_size > _MOST_SOURCE:
            return Unavailable("not a source file")
        text = read_regular(path, most=_MOST_SOURCE).decode("utf-8", "replace").splitlines()
    except (OSError, ValueError) as error:
        return Unavailable(getattr(error, "strerror", None) or str(error))
    if not 1 <= frame.line <= len(text):
        return Unavailable(f"the file has {len(text)} lines")
    low, high = max(1, frame.line - around), min(len(text), frame.line + around)
    lines = tuple((number, text[number - 1]) for number in range(low, high + 1))
    return Excerpt(str(path), frame.line, lines, bool(since) and status.st_mtime > since)
