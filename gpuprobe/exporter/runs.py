"""The exported runs: those being recorded on this machine, and given recordings."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from gpuprobe.errors import DataError, NotARecording, UsageError

if TYPE_CHECKING:
    from gpuprobe.model.run.totals import RankTotals
    from gpuprobe.recording.totals import TotalsTail
    from gpuprobe.reporters.metrics.run import RunReading

LINGER = 600.0
"""Seconds for which a discovered run is still exported after its end, so that its last values are
scraped."""

MAX_RANKS = 64
"""Most exported ranks of one run."""

_BUDGET = 32 << 20
"""Most bytes of recordings that one reading parses, in about 0.75 s. A longer recording is exported
once all of it has been read."""


@dataclass(frozen=True, slots=True)
class RunsReading:
    """The runs at one time. ``runs`` counts those in ``readings``, ``left_out`` the others;
    ``problems``: path -> the reason why it cannot be read.
    """

    readings: tuple[RunReading, ...]
    runs: int
    left_out: int
    problems: dict[str, str]


class RunWatch:
    """Follows the runs in ``paths``; for one thread at a time.

    A path is a recording (which may not exist yet), or a directory, of which those recordings
    (``*.gpuprobe``) are followed that are being written, or ended less than `LINGER` seconds ago.
    ``discover`` adds all recordings that a process of this user (for root: of any user) is writing.
    Of more than ``most`` runs, running ones come first, then the newest. Raises UsageError for a
    path that is a file.
    """

    def __init__(
        self,
        paths: Sequence[str | os.PathLike[str]],
        *,
        most: int = 16,
        discover: bool = False,
        now: Callable[[], float] = time.time,
    ) -> None:
        self.most = most
        # Not Path.resolve: before Python 3.13 that raises where links lead to themselves.
        self._paths = [Path(os.path.realpath(path)) for path in paths]
        for path in self._paths:
            if path.exists() and not path.is_dir():
                raise UsageError(
                    f"{path} is not a directory",
                    hint="give recordings, or directories of recordings",
                )
        self._discover = discover
        self._now = now
        self._tails: dict[Path, TotalsTail] = {}
        self._over: dict[Path, float] = {}  # ended long ago -> last change of its files

    def read(self) -> RunsReading:
        """Read what the runs have written since. Errors are in ``problems``, by run."""
        from gpuprobe.recording.totals import TotalsTail
        from gpuprobe.reporters.metrics.run import RunReading, run_name

        found, problems = self._found()
        open_now = self._open_now()
        # A discovered run stays for a while after its last process has closed it.
        for path in open_now | self._tails.keys():
            if path not in found:
                try:
                    found[path] = (_changed(path) or 0.0, False)
                except OSError as error:
                    problems[str(path)] = f"cannot read {path}: {error.strerror or error}"
        for gone in self._tails.keys() - found.keys():
            del self._tails[gone]
        self._over = {path: at for path, at in self._over.items() if path in found}
        budget = _BUDGET
        waiting = 0
        runs: list[tuple[bool, float, Path, list[RunReading]]] = []
        for path, (changed, named) in sorted(found.items(), key=lambda item: -item[1][0]):
            if self._over.get(path) == changed:
                continue
            tail = self._tails.setdefault(path, TotalsTail(path))
            try:
                totals, read = tail.poll(budget)
            except NotARecording:
                self._tails.pop(path)
                if named:  # else it has been removed since
                    problems[str(path)] = f"no recording yet: {path}"
                continue
            except DataError as error:
                problems[str(path)] = str(error)
                continue
            budget = max(0, budget - read)
            written = path in open_now
            states = [(_state(one, written, len(totals) == 1), one) for one in _local(totals)]
            running = any(state == "running" for state, _ in states)
            if not (named or running or self._now() - changed < LINGER):
                self._over[path] = changed
                del self._tails[path]
            elif tail.behind or not states:
                waiting += 1
            else:
                label = run_name(str(path))
                ranks = [RunReading(label, str(path), *pair) for pair in states[:MAX_RANKS]]
                runs.append((running, changed, path, ranks))
        runs.sort(key=lambda run: (not run[0], -run[1], run[2]))
        kept = runs[: self.most]
        return RunsReading(
            readings=tuple(reading for run in kept for reading in run[3]),
            runs=len(kept),
            left_out=len(runs) - len(kept) + waiting + len(problems),
            problems=problems,
        )

    def _open_now(self) -> set[Path]:
        if not self._discover:
            return set()
        from gpuprobe.recording.running import open_recordings

        return {Path(recording.path) for recording in open_recordings()}

    def _found(self) -> tuple[dict[Path, tuple[float, bool]], dict[str, str]]:
        """The last change of each recording's streams and whether it was given by path; and the
        paths that cannot be read, with the reason.
        """
        found: dict[Path, tuple[float, bool]] = {}
        problems: dict[str, str] = {}
        for path in self._paths:
            try:
                changed = _changed(path)
                if changed is not None or path.suffix == ".gpuprobe" or not path.is_dir():
                    found[path] = (changed or 0.0, True)
                    continue
                for child in path.iterdir():
                    if child.suffix == ".gpuprobe" and child not in found:
                        at = _changed(child)
                        if at is not None:
                            found[child] = (at, False)
            except OSError as error:
                problems[str(path)] = f"cannot read {path}: {error.strerror or error}"
        return found, problems


def _changed(path: Path) -> float | None:
    """The last change of a recording's streams, in seconds since the Unix epoch; None if it is not
    a recording. Raises OSError without the permission to read it.
    """
    from gpuprobe.recording.files import STREAM_NAME

    newest: float | None = None
    try:
        with os.scandir(path) as entries:
            for entry in entries:
                if STREAM_NAME.fullmatch(entry.name):
                    newest = max(newest or 0.0, entry.stat().st_mtime)
    except (FileNotFoundError, NotADirectoryError):  # removed since
        return None
    return newest


def _local(ranks: Sequence[RankTotals]) -> Sequence[RankTotals]:
    """The ranks of this machine, or all if none is. On a shared file system, the exporters of other
    machines export theirs.
    """
    here = socket.gethostname()
    local = [rank for rank in ranks if rank.environment.hostname == here]
    return local or ranks


def _state(totals: RankTotals, written: bool, alone: bool) -> str:
    """One of `gpuprobe.reporters.metrics.run.STATES`.

    ``written``: a process of this machine has the recording open. This detects runs whose session
    does not identify their process, since a container has its own hostname and PIDs; but not which
    rank it is, unless the rank is ``alone``.
    """
    from gpuprobe.model.run.recording import RankRecording
    from gpuprobe.recording.running import is_alive

    if totals.end is not None:
        return "complete" if totals.end.error is None else "failed"
    alive = is_alive(RankRecording(totals.session, totals.environment))
    if alive or (written and (alone or alive is None)):
        return "running"
    return "unknown" if alive is None else "incomplete"
