"""Writing a recording: append-only lines, and trace chunks that appear whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import threading
from dataclasses import replace
from os import close as os_close
from os import fstat
from os import open as os_open
from os import write as os_write
from pathlib import Path

from gpuprobe.clocks import sleep
from gpuprobe.errors import DataError, InternalError, UsageError
from gpuprobe.model.findings import Finding
from gpuprobe.model.io.codec import to_plain
from gpuprobe.model.io.descriptors import KeptDescriptor, LostDescriptor, without_size_signal
from gpuprobe.model.io.files import atomic_write, open_regular
from gpuprobe.model.run.session import (
    BlindSpot,
    Environment,
    Gap,
    HeldRows,
    LaterUses,
    Session,
    SessionEnd,
    Step,
)
from gpuprobe.model.trace import MemoryTrace
from gpuprobe.recording.chunks import encode_chunk
from gpuprobe.recording.files import (
    CHILD_NAME,
    CHUNK_NAME,
    STREAM_NAME,
    chunk_name,
    decode_header,
    encode_header,
    may_be_stream,
    rank_of_stream,
    stream_name,
)

_encode_json = json.JSONEncoder(separators=(",", ":"), check_circular=False, allow_nan=False).encode

_STREAM = os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC

_REOPENED = BlindSpot(
    "a descriptor of gpuprobe that the program closed: the recording was opened again",
    "no record is missing",
)

_QUIET = 0.1
"""Seconds that a thread in the background waits before it opens a stream again: the kernel gives
the lowest free number, for a moment, and a program that has just closed descriptors opens its own
next, which get the numbers that they have without gpuprobe."""


class RecordingWriter:
    """Writes one rank's part of a recording. Get one from `create`.

    Each record is one line, written with one ``write`` to a descriptor in append mode: a
    process that is killed loses at most the line it was writing. Nothing is synced to the
    disk: that guards against a crash of the machine, at milliseconds a step.

    Methods may be called from any thread. They raise OSError where the file system refuses
    (a full disk). What was lost is added up; the next record that can be written starts on a fresh
    line, after the `Gap` (and after the session, if that is missing). A process forked from the
    recorded one must not write: InternalError.
    """

    def __init__(self, path: Path, rank: int, descriptor: KeptDescriptor) -> None:
        self.path = path.absolute()  # the program may go to another directory
        self.rank = rank
        self._descriptor = descriptor
        self._pid = os.getpid()
        # Reentrant: Python runs signal handlers while `os.write` waits for a slow disk, and one of
        # the program's may end the recording.
        self._lock = threading.RLock()
        self._torn = False
        self._noted = False
        """Whether `_REOPENED` is written."""
        self._size = 0
        self._chunks = 0
        self._session = b""
        """The first records, until they are written."""
        self._gap: Gap | None = None
        self._written_gap: Gap | None = None

    @classmethod
    def create(
        cls, path: Path, *, rank: int = 0, world_size: int = 1, force: bool = False
    ) -> RecordingWriter:
        """Make the directory ``path`` (or join the one another rank made) and begin a stream.

        ``force`` replaces what this rank recorded there before; only in a directory that holds
        a recording and nothing else, which no process of this machine is writing. Raises UsageError
        where the recording cannot be made there; then nothing was changed.
        """
        path = Path(path)
        if not 0 <= rank < world_size:
            raise UsageError(f"rank {rank} does not exist in a job of {world_size}")
        try:
            doomed = _files_to_delete(path, rank, world_size, force)
            _refuse_live(path, doomed)
            for old in doomed:
                _delete(old)
            descriptor = _new_stream(path, rank, world_size)
        except FileExistsError as error:  # another process was faster
            raise _exists(path) from error
        except OSError as error:
            raise UsageError(
                f"cannot create the recording {path}: {error.strerror or error}",
                hint="choose another location for the recording",
            ) from error
        writer = cls(path, rank, descriptor)
        try:
            writer._put(encode_header(rank, world_size))
        except OSError as error:
            writer.close()
            (path / stream_name(rank)).unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # there are other ranks
                path.rmdir()
            raise UsageError(f"cannot write to {path}: {error.strerror or error}") from error
        return writer

    def session(self, session: Session, environment: Environment) -> None:
        """The first records: environment and session. If they cannot be written, the next record
        is written after them."""
        self._session = _line("environment", environment) + _line("session", session)
        self._write(b"")

    def step(self, step: Step) -> None:
        """A finished step. One with an index that was written before replaces it."""
        self._write(_line("step", step), step=step.index)

    def trace(self, trace: MemoryTrace) -> str:
        """Write a chunk; return its name, which belongs in `Step.traces`.

        The chunk is complete on return: a step that names it is written afterwards.
        """
        self._check_process()
        data = encode_chunk(trace)
        with self._lock:
            if self._descriptor.closed:
                raise InternalError("a trace was written after the recording was closed")
            name = chunk_name(self.rank, self._chunks)
            temporary = self.path / f".{name}.tmp"
            try:
                self._reopen()
                with (
                    without_size_signal(),
                    atomic_write(self.path / name, temporary=temporary) as file,
                ):
                    file.write(data)
            except OSError as error:
                gap = self._gap_after(error)
                self._gap = replace(gap, traces=gap.traces + 1)
                raise
            self._chunks += 1
        return name

    def later_uses(self, uses: LaterUses) -> None:
        """The uses, by a later step, of memory in a trace that was written before."""
        self._write(_line("later_uses", uses))

    def held(self, held: HeldRows) -> None:
        """What holds memory of a trace that was written before."""
        self._write(_line("held", held))

    def finding(self, finding: Finding) -> None:
        self._write(_line("finding", finding))

    def blind_spot(self, spot: BlindSpot) -> None:
        self._write(_line("blind_spot", spot))

    def end(self, end: SessionEnd) -> None:
        """The last record, after the gap if there is one: readers of the end of a long stream
        have both. A recording without an end is incomplete.
        """
        self._written_gap = None
        self._write(_line("end", end))

    def close(self) -> None:
        """Close the stream; a second call does nothing."""
        with self._lock:
            self._descriptor.close()

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise InternalError(
                f"the recording belongs to process {self._pid}; its child {os.getpid()} wrote to it"
            )

    def _write(self, data: bytes, *, step: int | None = None) -> None:
        """Write a record, after what has to be written before it. ``step``: the index of the step
        that it describes.
        """
        self._check_process()  # before the lock: a fork may have left that taken
        with self._lock:
            if self._descriptor.closed:
                raise InternalError("a record was written after the recording was closed")
            gap = self._gap
            before = self._session
            if gap is not None and gap != self._written_gap:
                before += _line("gap", gap)
            try:
                self._put_or_again(before + data)
            except OSError as error:
                if data:
                    self._gap = self._gap_after(error).with_record(step)
                raise
            self._session = b""
            self._written_gap = gap

    def _put_or_again(self, data: bytes) -> None:
        """Write whole lines, and again if the program closes the descriptor meanwhile, as any
        of its threads can.
        """
        self._reopen()
        try:
            self._put(data)
        except OSError as error:
            if error.errno != errno.EBADF:
                raise
            self._reopen()
            self._put(data)

    def _put(self, data: bytes) -> None:
        """Write whole lines; the first one starts a line."""
        if self._torn:
            data = b"\n" + data
        rest = memoryview(data)
        try:
            with without_size_signal():
                while rest:
                    # One call, unless the kernel takes less than the whole.
                    rest = rest[os_write(self._descriptor.number, rest) :]
            self._torn = False
        except OSError:
            if len(rest) < len(data):
                self._torn = True
            raise
        finally:
            self._size += len(data) - len(rest)

    def _gap_after(self, error: OSError) -> Gap:
        return self._gap or Gap(error.strerror or str(error), 0)

    def _reopen(self) -> None:
        """Open the stream again if the program has closed its descriptor, and note that.

        Raises LostDescriptor if another file has its name now; OSError, also if it was deleted, or
        replaced by another recording: what is written to it reaches no reader, and a chunk would
        reach those of the other.
        """
        try:
            status = self._descriptor.status()
        except LostDescriptor:
            if threading.get_ident() != threading.main_thread().ident:
                sleep(_QUIET)
            again = os_open(self.path / stream_name(self.rank), _STREAM | os.O_NOFOLLOW)
            status = fstat(again)
            # A file that replaced a deleted one may have its inode.
            if status.st_size != self._size:
                os_close(again)
                raise
            if not self._descriptor.replace(again):
                raise
            if not self._noted:
                self._put(_line("blind_spot", _REOPENED))
                self._noted = True
        if not status.st_nlink:
            raise OSError(errno.ENOENT, "the recording was removed or replaced", str(self.path))


def _line(kind: str, record: object) -> bytes:
    plain = {"type": kind}
    plain.update(to_plain(record))
    return _encode_json(plain).encode() + b"\n"


def _new_stream(path: Path, rank: int, world_size: int) -> KeptDescriptor:
    """Create the stream of a rank, in its directory. Each other rank may remove that once
    meanwhile, if it cannot write. Raises OSError.
    """
    stream = path / stream_name(rank)
    others = world_size - 1
    while True:
        path.mkdir(exist_ok=True)
        try:
            return KeptDescriptor(os_open(stream, _STREAM | os.O_CREAT | os.O_EXCL, 0o666))
        except FileNotFoundError:
            if not others:
                raise
            others -= 1


def _exists(path: Path) -> UsageError:
    return UsageError(
        f"the recording {path} exists already",
        hint="choose another name, or replace it with --force (force=True)",
    )


def _files_to_delete(path: Path, rank: int, world_size: int, force: bool) -> list[Path]:
    """What has to be deleted before this rank can write to ``path``: nothing, or with
    ``force`` the recording that is there, streams first.

    Raises UsageError where the recording cannot be made there, OSError.
    """
    if not path.exists() and not path.is_symlink():
        if not path.parent.is_dir():
            raise UsageError(
                f"cannot create the recording {path}: there is no directory {path.parent}",
                hint=f"mkdir -p {path.parent}",
            )
        return []
    if not path.is_dir():
        raise UsageError(
            f"cannot create the recording {path}: it exists and is not a directory",
            hint="choose another name",
        )
    present = sorted(path.iterdir())
    if not present:
        return []
    foreign = [entry for entry in present if not _is_ours(entry)]
    if foreign:
        raise UsageError(
            f"cannot create the recording {path}: the directory holds other files "
            f"({foreign[0].name}{', …' if len(foreign) > 1 else ''})",
            hint="choose another name; gpuprobe only replaces recordings",
        )
    if force:
        return _to_replace(present, rank, world_size)
    if world_size == 1 or any(_rank_of(entry) == rank for entry in present):
        raise _exists(path)
    for entry in present:
        if rank_of_stream(entry.name) is not None and _world_size(entry) not in (None, world_size):
            raise _exists(path)  # left over from another run
    return []


def _refuse_live(path: Path, doomed: list[Path]) -> None:
    """Raise UsageError if a process writes one of these streams. Raises OSError, DataError."""
    from gpuprobe.recording.running import live_writer  # only for a recording that is replaced

    for entry in doomed:
        writer = live_writer(entry) if rank_of_stream(entry.name) is not None else None
        if writer is not None:
            raise UsageError(
                f"cannot replace the recording {path}: process {writer} is writing it",
                hint="choose another name, or wait for the end of that run",
            )


def _to_replace(present: list[Path], rank: int, world_size: int) -> list[Path]:
    """With several ranks each replaces only its own files, as the others may already have
    started again; the first also removes those of ranks that the new run does not have."""
    doomed = []
    for entry in present:
        owner = _rank_of(entry)
        if world_size == 1 or owner == rank or (rank == 0 and (owner or 0) >= world_size):
            doomed.append(entry)
    return sorted(doomed, key=lambda entry: rank_of_stream(entry.name) is None)


def _rank_of(entry: Path) -> int | None:
    """The rank that a stream, a chunk, a leftover of a chunk or the recording of a process that it
    started belongs to; None for other files.
    """
    name = entry.name
    if name.startswith(".") and name.endswith(".tmp"):
        name = name[1:-4]
    found = STREAM_NAME.fullmatch(name) or CHUNK_NAME.fullmatch(name) or CHILD_NAME.fullmatch(name)
    return int(found[1]) if found else None


def _is_ours(entry: Path) -> bool:
    """Whether ``entry`` is a file, or a directory of files, of this module. Raises OSError."""
    if CHILD_NAME.fullmatch(entry.name) and not entry.is_symlink() and entry.is_dir():
        return all(not inner.is_dir() and _is_ours(inner) for inner in entry.iterdir())
    if entry.is_symlink() or not entry.is_file() or _rank_of(entry) is None:
        return False
    if rank_of_stream(entry.name) is None:
        return True
    with open_regular(entry, inside=True) as file:
        return may_be_stream(file.read(64))


def remove_recording(path: Path) -> None:
    """Delete a recording, and its directory unless the program has put other files there. Raises
    OSError.
    """
    for entry in sorted(path.iterdir()):
        if _is_ours(entry):
            _delete(entry)
    with contextlib.suppress(OSError):  # not empty
        path.rmdir()


def _delete(entry: Path) -> None:
    if not entry.is_dir():
        entry.unlink()
        return
    for inner in entry.iterdir():
        inner.unlink()
    entry.rmdir()


def _world_size(stream: Path) -> int | None:
    """The world size in a stream's session; None while its header is not complete."""
    with open_regular(stream, inside=True) as file:
        line = file.readline(64 * 1024)
    if not line.endswith(b"\n"):
        return None
    try:
        return decode_header(line, stream.name).world_size
    except DataError:
        return -1
