"""Dumps of torch's Flight Recorder, read without executing them.

One file for each rank, whose name ends with the rank: so ``TORCH_NCCL_DUMP_ON_TIMEOUT`` writes them
and torch/distributed/flight_recorder/components/loader.py reads them. A dump is a pickle of plain
data (torch/csrc/distributed/c10d/FlightRecorder.hpp). It is read as memory snapshots are: in a
separate process with limits, in which no names are looked up.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from gpuprobe.errors import DataError, InternalError, NotARecording, SnapshotError
from gpuprobe.model.io.codec import from_plain
from gpuprobe.model.io.files import open_regular
from gpuprobe.model.run.hang import FlightDump
from gpuprobe.recording.snapshot.child import command_of, limit_process
from gpuprobe.recording.snapshot.pickles import load_plain

HINT: Final = "a directory with a dump of each rank: see TORCH_NCCL_DUMP_ON_TIMEOUT"

_RANK: Final = re.compile(r"([0-9]{1,6})(\.(pickle|pkl))?$")

_MOST_DUMP: Final = 1 << 30
"""Bytes of a dump. An entry with its stack takes a few KB, and the recorder keeps thousands."""

_MOST_FILES: Final = 65_536


def read_dumps(directory: Path) -> tuple[dict[int, FlightDump], tuple[str, ...]]:
    """The dump of each rank, and the names of files that are not dumps.

    Raises NotARecording if there is no dump, DataError for one that cannot be read.
    """
    found: dict[int, FlightDump] = {}
    skipped: list[str] = []
    try:
        names = sorted(entry.name for entry in directory.iterdir() if not entry.is_dir())
        if len(names) > _MOST_FILES:
            raise DataError(f"{directory} has more than {_MOST_FILES} files", hint=HINT)
        for name in names:
            rank = _RANK.search(name)
            plain = _read(directory / name) if rank is not None else None
            if rank is None or plain is None:
                skipped.append(name)
                continue
            number = int(rank[1])
            if number in found:
                raise DataError(f"{directory} has two dumps of rank {number}", hint=HINT)
            found[number] = from_plain(FlightDump, plain, f"{directory / name}")
    except (FileNotFoundError, NotADirectoryError) as error:
        raise NotARecording(f"there is no directory {directory}", hint=HINT) from error
    except OSError as error:
        raise DataError(f"cannot read {directory}: {error.strerror or error}") from error
    if not found:
        raise NotARecording(f"{directory} has no Flight Recorder dump", hint=HINT)
    return found, tuple(skipped)


def _read(path: Path) -> dict[str, Any] | None:
    """A dump as plain data; None for a file that is not one. Raises OSError and DataError."""
    with open_regular(path, inside=True) as stream:
        if stream.peek(1)[:1] != b"\x80":  # type: ignore[attr-defined]
            return None
        size = os.fstat(stream.fileno()).st_size
        if size > _MOST_DUMP:
            raise DataError(f"{path}: a dump of {size} bytes is too large")
        os.lseek(stream.fileno(), 0, os.SEEK_SET)  # what was peeked at is read again
        try:
            child = subprocess.run(
                command_of(__name__, size), stdin=stream, capture_output=True, check=False
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


def main(size: int) -> None:
    """The process that reads: JSON on stdout."""
    limit_process(size)
    try:
        with open(0, "rb", buffering=1 << 16, closefd=False) as stream:
            found = load_plain(stream, size)
        kept = None
        if isinstance(found, Mapping):
            kept = {key: found[key] for key in ("entries", "pg_config") if key in found}
        answer = json.dumps({"dump": kept})
    except SnapshotError as error:
        answer = json.dumps({"error": str(error)})
    except (TypeError, ValueError, RecursionError):
        answer = json.dumps({"error": "not a Flight Recorder dump"})
    sys.stdout.write(answer)
    sys.stdout.flush()
    os._exit(0)
