"""Processes that a recorded program started: their recordings are directories inside its own."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Final

from gpuprobe.errors import DataError, GpuprobeError
from gpuprobe.model.run.columns import FULL
from gpuprobe.model.run.recording import ChildPeak, ChildProcess
from gpuprobe.model.values import MOST_DEVICES
from gpuprobe.recording.files import CHILD_NAME, stream_names
from gpuprobe.recording.reader import read_recording

MOST: Final = 10_000
"""Of them that are read."""


def child_names(directory: Path) -> list[str]:
    """The names of their recordings, in order. Raises OSError."""
    found = [
        entry.name
        for entry in directory.iterdir()
        if CHILD_NAME.fullmatch(entry.name) and not entry.is_symlink() and entry.is_dir()
    ]
    return sorted(found)[:MOST]


def read_children(directory: Path) -> tuple[ChildProcess, ...]:
    """All whose recordings can be read, in the order in which they began."""
    try:
        names: Iterable[str] = child_names(directory)
    except OSError:  # it was removed since
        return ()
    read: set[tuple[int, int]] = set()
    found = []
    for name in names:
        streams = _streams(directory / name)
        # A stream under several names would be read as often, but belongs to one process.
        if read.isdisjoint(streams):
            read |= streams
            child = _read(directory / name)
            if child is not None:
                found.append(child)
    return tuple(sorted(found, key=lambda child: (child.session.started_at, child.name)))


def _streams(path: Path) -> set[tuple[int, int]]:
    """The device and inode of each stream of a recording; none if it cannot be read."""
    try:
        found = [(path / name).stat() for name in stream_names(path).values()]
    except (OSError, DataError):
        return set()
    return {(status.st_dev, status.st_ino) for status in found if status.st_ino}


def _read(path: Path) -> ChildProcess | None:
    from gpuprobe.analysis.peak.peaks import device_peaks  # 10 ms: few programs start processes

    try:
        recording = read_recording(path)
    except GpuprobeError:  # it begins, or was damaged: `gpuprobe report` of it gives the reason
        return None
    rank = recording.ranks[0]
    peaks = tuple(
        ChildPeak(site.device, site.amount, site.reserved)
        for site in device_peaks(recording)
        if site.device
    )
    return ChildProcess(
        path.name,
        int(path.name.split("-")[1]),
        rank.session,
        rank.environment,
        sum(rank.columns.mark(*FULL)),
        peaks[:MOST_DEVICES],
        rank.end,
        rank.gap,
    )
