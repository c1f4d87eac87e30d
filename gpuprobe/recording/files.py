"""The files of a recording, and the first line of each stream.

::

    NAME.gpuprobe/
        rank-00000.jsonl                one stream per process: a header, then one record a line
        rank-00000.trace-000003.cols    a chunk of allocation trace (see ``chunks``)
        child-00000-4711.gpuprobe/      the recording of a process that rank 0 started

Streams are append-only. A record is a JSON object whose ``type`` determines the other keys:
``environment``, ``session``, ``step``, ``finding``, ``blind_spot``, ``gap`` or ``end``. Readers
skip unknown types. A finding with the fingerprint and places of an earlier one replaces it, and a
gap the one before it.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from gpuprobe.errors import DataError, NotARecording
from gpuprobe.model.io.codec import from_plain
from gpuprobe.model.io.document import check_version, header
from gpuprobe.model.record import record
from gpuprobe.model.run.recording import SCHEMA, SCHEMA_VERSION
from gpuprobe.model.values import Rank, World

STREAM_NAME = re.compile(r"rank-([0-9]{5,10})\.jsonl")
CHUNK_NAME = re.compile(r"rank-([0-9]{5,10})\.trace-([0-9]{6,12})\.cols")

CHILD_NAME = re.compile(r"child-([0-9]{5,10})-[0-9]{1,10}(-[0-9]{1,6})?\.gpuprobe")
"""The recording of a process that the program started: with the program's rank, and the id of the
process."""

MAX_LINE = 16 * 1024 * 1024
"""Bytes. No record is near this long (a step has some 1 KB for each of its phases and devices): a
longer line is not one, and is not read into memory."""

MAX_DAMAGED = 10_000
"""The most damaged lines of a stream: a full disk damages a few."""

MAX_FINDINGS = 10_000
"""The most findings of a stream. Each has another line of the program; a large run has hundreds."""

MAX_STREAM = 4 << 30
"""Bytes of one stream: a million steps. What is larger was not recorded (a sparse file has any size
that its maker likes), and is not read."""

MAX_RANKS = 16_384
"""Streams in a directory. The largest jobs have as many processes; each stream is opened at every
look."""

MAX_CHUNK = 256 << 20
"""Bytes of a trace chunk. A million events with their stacks take 8 MB."""

_MAX_HEADER = 64 * 1024

_START = f'{{"schema":"{SCHEMA}"'.encode()
"""The first bytes of every stream."""


class Header(NamedTuple):
    """The first line of a stream."""

    version: tuple[int, int]
    rank: int
    world_size: int


def stream_name(rank: int) -> str:
    return f"rank-{rank:05d}.jsonl"


def chunk_name(rank: int, number: int) -> str:
    return f"rank-{rank:05d}.trace-{number:06d}.cols"


def rank_of_stream(name: str) -> int | None:
    """The rank whose stream a file of this name is, or None where it is no stream."""
    found = STREAM_NAME.fullmatch(name)
    return int(found[1]) if found else None


def stream_names(directory: Path) -> dict[int, str]:
    """rank -> name of its stream, in rank order. Raises OSError, and DataError for more than
    `MAX_RANKS`."""
    ranks = {}
    for entry in directory.iterdir():
        rank = rank_of_stream(entry.name)
        if rank is not None:
            ranks[rank] = entry.name
            if len(ranks) > MAX_RANKS:
                raise DataError(
                    f"{directory} holds the streams of more than {MAX_RANKS} ranks",
                    hint="this is more than any job has; is it a single recording?",
                )
    return dict(sorted(ranks.items()))


def encode_header(rank: int, world_size: int) -> bytes:
    """The first line."""
    plain = {**header(SCHEMA, SCHEMA_VERSION), "rank": rank, "world_size": world_size}
    return json.dumps(plain, separators=(",", ":")).encode() + b"\n"


def decode_header(line: bytes, name: str) -> Header:
    """Read a first line. ``name`` is the stream's, for messages.

    Raises NotARecording where it is something else, UnsupportedSchema where it was written by
    a newer major version, DataError where it is damaged.
    """
    try:
        plain = json.loads(line) if len(line) <= _MAX_HEADER else None
    except (ValueError, RecursionError):
        plain = None
    if not isinstance(plain, dict) or plain.get("schema") != SCHEMA:
        if line.startswith(_START):
            raise DataError(f"{name}: the header of the recording is damaged")
        raise NotARecording(f"{name}: does not begin with the header of a gpuprobe recording")
    version = check_version(plain, SCHEMA_VERSION, name)
    place = from_plain(_RankHeader, plain, f"{name}: the header of the recording is damaged")
    return Header(version, place.rank, place.world_size)


@record(frozen=True)
class _RankHeader:
    rank: Rank
    world_size: World


def may_be_stream(head: bytes) -> bool:
    """Whether ``head``, the first bytes of a file, may be those of a stream (or a torn one)."""
    return head[: len(_START)] == _START[: len(head)]


@contextmanager
def scratch_recording() -> Iterator[Path]:
    """A path for a recording that this process removes on exit. A ``tempfile.TemporaryDirectory``
    would also be removed by each forked child that ends.
    """
    import shutil  # 7 ms, the two: only for temporary recordings
    import tempfile

    process = os.getpid()
    folder = tempfile.mkdtemp(prefix="gpuprobe-")
    try:
        yield Path(folder, "run.gpuprobe")
    finally:
        if os.getpid() == process:
            shutil.rmtree(folder, ignore_errors=True)
