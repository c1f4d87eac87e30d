"""Recordings that a process of this machine is writing right now.

A recorder keeps its stream open for as long as it writes, so the open files of the processes
say which recordings there are. Nothing has to be announced, nothing is left behind by a
process that was killed, and a container's recording is found too. Only processes that this
user may inspect are included: the user's own, or for root all.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

from gpuprobe.errors import DataError, GpuprobeError, NotARecording
from gpuprobe.model.io.files import open_regular
from gpuprobe.model.record import record
from gpuprobe.model.run.recording import RankRecording
from gpuprobe.model.run.totals import Run, RunSummary
from gpuprobe.model.trace import MemoryTrace
from gpuprobe.model.values import Unavailable
from gpuprobe.recording.files import rank_of_stream, stream_names
from gpuprobe.recording.stream import StreamParser

_PROC = Path("/proc")

_HEAD = 1 << 20
"""Bytes that are searched for the header, the environment and the session."""

_TAIL = 1 << 18
"""Bytes at the end that are searched for the newest step."""


@record(frozen=True, slots=True)
class OpenRecording:
    """A recording's directory, and the processes that write it (with their children, which
    inherit open files).
    """

    path: str
    pids: tuple[int, ...]


def open_recordings() -> list[OpenRecording]:
    """The recordings being written, by path. Costs a look at each open file of each process of
    this user: about 10 µs a file.
    """
    found: dict[str, set[int]] = {}
    for pid, stream in _streams():
        found.setdefault(stream.rpartition("/")[0], set()).add(pid)
    return [OpenRecording(path, tuple(sorted(pids))) for path, pids in sorted(found.items())]


def running() -> list[Run]:
    """The recordings being written with the newest of each, by path. One that goes away meanwhile
    is left out.
    """
    found = []
    for recording in open_recordings():
        summary: RunSummary | Unavailable | None
        try:
            summary = summarize_run(Path(recording.path))
        except NotARecording:
            continue
        except GpuprobeError as error:
            summary = Unavailable(str(error))
        found.append(Run(recording.path, recording.pids, summary))
    return found


def live_writer(stream: Path) -> int | None:
    """The process of this machine that writes a stream of a recording now; None without one.

    Of the processes that have it open for writing, children of the recorded one inherited it: they
    do not write. Raises what reading the stream raises.
    """
    holders = [
        pid for pid, path in _streams() if Path(path).name == stream.name and _same(path, stream)
    ]
    if not holders:
        return None
    parser = StreamParser(stream.name)
    with open_regular(stream, inside=True) as file:
        head = file.read(_HEAD)
        file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL))
        tail = file.read(_TAIL)
    parser.feed(head[: head.rfind(b"\n") + 1])
    session = parser.session
    if session is None or session.pid in holders:
        ended = b'\n{"type":"end",' in b"\n" + tail
        return None if ended else holders[0] if session is None else session.pid
    # A process in a container has another number here: then whichever has it open.
    return holders[0] if _in_another_namespace(holders[0]) else None


def _same(one: str, other: Path) -> bool:
    try:
        return other.samefile(one)
    except OSError:  # removed meanwhile
        return False


def _in_another_namespace(pid: int) -> bool:
    try:
        return not (_PROC / "self/ns/pid").samefile(_PROC / str(pid) / "ns/pid")
    except OSError:
        return False


def _streams() -> Iterator[tuple[int, str]]:
    """(process, path) of every open file that is named as a stream is, and is there."""
    if not sys.platform.startswith("linux"):
        yield from _streams_by_psutil()
        return
    try:
        with os.scandir(_PROC) as entries:
            pids = [int(entry.name) for entry in entries if entry.name.isdecimal()]
    except OSError:
        return
    for pid in pids:
        for path in _written_streams(pid):
            yield pid, path


def _written_streams(pid: int) -> Iterator[str]:
    """The streams that a process has open for writing, by names that lead to them from here."""
    folder = _PROC / str(pid)
    try:
        with os.scandir(folder / "fd") as entries:
            numbers = [entry.name for entry in entries]
    except OSError:  # it ended, or is another user's
        return
    for number in numbers:
        try:
            target = os.readlink(f"{folder}/fd/{number}")  # noqa: PTH115 - thousands of them
            if not target.endswith(".jsonl") or rank_of_stream(target.rpartition("/")[2]) is None:
                continue
            if not _for_writing(folder / "fdinfo" / number):
                continue
        except OSError:  # closed meanwhile
            continue
        # A process in a container has other names for its files: from its own root they hold.
        for path in (target, f"{folder}/root{target}"):
            try:
                if (folder / "fd" / number).samefile(path):
                    yield path
                    break
            except OSError:  # deleted, or not reachable under this name
                continue


def _for_writing(fdinfo: Path) -> bool:
    """Whether the file was opened for writing: a reader is no recorder."""
    with fdinfo.open(encoding="ascii") as file:
        for line in file:
            if line.startswith("flags:"):
                return int(line.split()[1], 8) & os.O_ACCMODE != os.O_RDONLY
    return False


def _streams_by_psutil() -> Iterator[tuple[int, str]]:  # pragma: no cover - not on Linux
    import psutil

    for process in psutil.process_iter():
        try:
            files = process.open_files()
        except (psutil.Error, OSError):
            continue
        for file in files:
            path = file.path.replace("\\", "/")
            if rank_of_stream(path.rpartition("/")[2]) is not None:
                yield process.pid, path


def summarize_run(path: Path) -> RunSummary | None:
    """The session and newest step, from the beginning and the end of the first stream only.

    None before the session begins. Raises NotARecording if it is not a recording (any more),
    UnsupportedSchema or DataError if it cannot be read.
    """
    try:
        names = stream_names(path)
        if not names:
            raise NotARecording(f"{path} is not a recording: no rank's stream in it")
        name = next(iter(names.values()))
        with open_regular(path / name, inside=True) as file:
            head = file.read(_HEAD)
            size = os.fstat(file.fileno()).st_size
            start = max(len(head), size - _TAIL)
            file.seek(start)
            tail = file.read(_TAIL) if start < size else b""
    except (FileNotFoundError, NotADirectoryError) as error:
        raise NotARecording(f"no such recording: {path}") from error
    except OSError as error:
        raise DataError(f"cannot read the recording {path}: {error.strerror or error}") from error
    parser = StreamParser(name)
    parser.feed(head[: head.rfind(b"\n") + 1] or head)
    if tail and start > len(head):  # begins within a line
        tail = tail[tail.find(b"\n") + 1 :]
    elif tail:
        tail = head[head.rfind(b"\n") + 1 :] + tail
    parser.feed(tail[: tail.rfind(b"\n") + 1])
    if parser.session is None:
        return None
    rank = parser.result(_no_trace)
    last = rank.steps[-1] if rank.steps else None
    return RunSummary(
        str(path), len(names), rank.session, rank.environment, last, rank.end, rank.gap
    )


def _no_trace(name: str) -> MemoryTrace:
    raise DataError(f"{name}: a summary does not read traces")


def is_alive(rank: RankRecording) -> bool | None:
    """Whether the process that writes a recording still runs; None where it cannot be known,
    as when it ran on another machine.
    """
    import socket  # 4 ms, only for a recording without an end

    if rank.environment.hostname != socket.gethostname():
        return None
    import psutil  # 15 ms, only for a recording without an end

    try:
        process = psutil.Process(rank.session.pid)
        # A process that is younger than the recording only got the same number.
        return bool(process.create_time() <= rank.session.started_at + 1.0) and (
            process.status() != psutil.STATUS_ZOMBIE
        )
    except psutil.NoSuchProcess:
        return False
    except (psutil.Error, ValueError, OverflowError):
        return None
