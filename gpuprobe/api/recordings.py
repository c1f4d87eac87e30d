"""Reading recordings, and reporting on them."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpuprobe.errors import DataError, NotARecording, UsageError

if TYPE_CHECKING:
    from gpuprobe.model.run.recording import RankRecording, Recording

__all__ = ["load", "report", "scratch_recording"]


@contextmanager
def scratch_recording() -> Iterator[Path]:
    """A name for a recording that is removed afterwards: by this process only. A
    ``tempfile.TemporaryDirectory`` is removed by each forked child that comes to its end, too.
    """
    process = os.getpid()
    folder = tempfile.mkdtemp(prefix="gpuprobe-")
    try:
        yield Path(folder, "run.gpuprobe")
    finally:
        if os.getpid() == process:
            shutil.rmtree(folder, ignore_errors=True)


def load(path: str | os.PathLike[str]) -> Recording:
    """Read a recording (a directory) or a torch memory snapshot (a ``.pickle`` file).

    A snapshot is parsed, never executed: nothing in it can run. A recording may still be being
    written; what is on disk by now is read.

    Raises UsageError where there is no such path, NotARecording where it is something else,
    UnsupportedSchema where a newer major version wrote it, SnapshotError and DataError where
    it is damaged or cannot be read.
    """
    where = Path(path)
    try:
        if where.is_dir():
            from gpuprobe.recording.reader import read_recording

            return read_recording(where)
        if where.is_file():
            _refuse_stream(where)
            # Deferred: most loads are of directories, and need none of the snapshot reader.
            from gpuprobe.recording.snapshot.load import read_snapshot

            return read_snapshot(where)
        exists = where.exists()
    except OSError as error:
        raise DataError(f"cannot read {where}: {error.strerror or error}") from error
    if exists:
        raise NotARecording(f"{where} is neither a recording nor a memory snapshot")
    raise UsageError(
        f"no such file or directory: {where}",
        hint="a recording is a directory written by 'gpuprobe run' or gpuprobe.record(...)",
    )


def _refuse_stream(path: Path) -> None:
    """One file of a recording is given: say so, rather than that it is no snapshot."""
    from gpuprobe.recording.files import CHUNK_NAME, STREAM_NAME

    if STREAM_NAME.fullmatch(path.name) or CHUNK_NAME.fullmatch(path.name):
        raise NotARecording(
            f"{path} is one file of a recording, which is a directory",
            hint=f"give the directory: {path.parent}",
        )


def report(recording: Recording, *, top: int = 10) -> dict[str, Any]:
    """Say where the memory went, as a JSON-ready document (schema ``gpuprobe.report``, version 1,
    shipped as ``gpuprobe/reporters/json/schemas/report-1.json``).

    Sizes are integers in bytes, durations integers in nanoseconds; a value that is not known
    is ``{"unavailable": reason, "status": …}``. ``top`` bounds the tables of lines and
    modules; what they leave out is in their remainder.
    """
    from gpuprobe.analysis.summary import summarize
    from gpuprobe.model.gc_pause import gc_paused

    with gc_paused():  # half of the time, for a report of 64 ranks
        return summarize(recording, top=top, is_running=_is_running)


def _is_running(rank: RankRecording) -> bool | None:
    """Whether the process that writes a recording still runs; None where it cannot be told,
    as when it ran on another machine.
    """
    import socket

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
