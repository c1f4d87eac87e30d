"""Opening whatever a path leads to: a recording, or a torch memory snapshot."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

from gpuprobe.errors import DataError, NotARecording, UsageError
from gpuprobe.model.io.files import open_regular
from gpuprobe.model.run.recording import Recording
from gpuprobe.recording.files import CHUNK_NAME, STREAM_NAME
from gpuprobe.recording.many.children import read_children
from gpuprobe.recording.reader import RecordingTail, read_recording
from gpuprobe.recording.snapshot.child import PendingRead


def load(path: str | os.PathLike[str], pending: PendingRead | None = None) -> Recording:
    """Read a recording (a directory) or a torch memory snapshot (a ``.pickle`` file).

    A snapshot is parsed, never executed: nothing in it can run; ``pending`` is one that a process
    reads already. A recording may still be being written; what is on disk by now is read.

    Raises UsageError if the path does not exist, NotARecording if it is something else,
    UnsupportedSchema if a newer major version wrote it, SnapshotError and DataError if it is
    damaged or cannot be read.
    """
    where = Path(path)
    try:
        if where.is_dir():
            recording = read_recording(where)
            recording.load_children = partial(read_children, where)
            return recording
        if where.is_file():
            refuse_stream(where)
            _refuse_packed(where)
            # Deferred: most recordings are directories, which need no snapshot reader.
            from gpuprobe.recording.snapshot.load import read_snapshot

            return read_snapshot(where, pending)
        exists = where.exists()
    except OSError as error:
        raise DataError(f"cannot read {where}: {error.strerror or error}") from error
    if exists:
        raise NotARecording(f"{where} is neither a recording nor a memory snapshot")
    raise UsageError(
        f"no such file or directory: {where}",
        hint="a recording is a directory written by 'gpuprobe run' or gpuprobe.record(...)",
    )


def _refuse_packed(path: Path) -> None:
    """Raise NotARecording for a Parquet file, to which development versions could pack a recording.
    Raises OSError.
    """
    with open_regular(path) as file:
        if file.read(4) == b"PAR1":
            raise NotARecording(
                f"{path} is a Parquet file: packed recordings are no longer read",
                hint="read the directory that it was packed from; the column data has its lines",
            )


def refuse_stream(path: Path) -> None:
    """Raise NotARecording for one file of a recording: the error names the directory."""
    if STREAM_NAME.fullmatch(path.name) or CHUNK_NAME.fullmatch(path.name):
        raise NotARecording(
            f"{path} is one file of a recording, which is a directory",
            hint=f"give the directory: {path.parent}",
        )


class Followed:
    """A recording or a snapshot that is open on a screen.

    `poll` reads what is new of a recording, and a snapshot once, at the first call: that of a
    million events takes seconds. Raises UsageError if the path does not exist, NotARecording if it
    can be neither; `poll` raises what `gpuprobe.load` raises.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._tail = RecordingTail(self.path) if self.path.is_dir() else None
        self._whole: Recording | None = None
        if self._tail is None:
            if self.path.is_file():
                refuse_stream(self.path)
            else:
                self._whole = load(self.path)  # raises, with the reason

    def poll(self) -> Recording:
        """What is on disk now."""
        if self._tail is not None:
            return self._tail.poll()
        if self._whole is None:
            self._whole = load(self.path)
        return self._whole

    @property
    def cheap(self) -> bool:
        """Whether the first `poll` is over soon: so it is for all but snapshots."""
        return self._tail is not None
