"""The files of a recording, and the first line of each stream.

::

    NAME.gpuprobe/
        rank-00000.jsonl                one stream per process: a header, then one record a line
        rank-00000.trace-000003.cols    a chunk of allocation trace (see ``chunks``)

A stream is only ever appended to. A record is a JSON object whose ``type`` says what the other
keys are: ``environment``, ``session``, ``step``, ``finding``, ``blind_spot`` or ``end``.
A reader skips types it does not know. A finding that was told before (the same fingerprint and
places) replaces the earlier record: a race is written when it is found, and again when the run
ends and more is known of it.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

from gpuprobe._version import __version__
from gpuprobe.errors import DataError, NotARecording, UnsupportedSchema
from gpuprobe.model.run.recording import FORMAT, SCHEMA_VERSION

__all__ = [
    "CHUNK_NAME",
    "MAX_LINE",
    "STREAM_NAME",
    "Header",
    "chunk_name",
    "decode_header",
    "encode_header",
    "looks_like_stream",
    "rank_of_stream",
    "stream_name",
    "stream_names",
]

STREAM_NAME = re.compile(r"rank-(\d{5,})\.jsonl")
CHUNK_NAME = re.compile(r"rank-(\d{5,})\.trace-(\d{6,})\.cols")

MAX_LINE = 64 * 1024 * 1024
"""Bytes. No record is near this long: a longer line is not one, and is not read into memory."""

_MAX_HEADER = 64 * 1024

_START = b'{"format":"' + FORMAT.encode() + b'"'
"""What every stream this package wrote begins with."""


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
    """rank -> name of its stream, in rank order. Raises OSError."""
    ranks = {}
    for entry in directory.iterdir():
        rank = rank_of_stream(entry.name)
        if rank is not None:
            ranks[rank] = entry.name
    return dict(sorted(ranks.items()))


def encode_header(rank: int, world_size: int) -> bytes:
    """The first line. ``format`` comes first, so that a glance at the file tells what it is."""
    header = {
        "format": FORMAT,
        "version": list(SCHEMA_VERSION),
        "rank": rank,
        "world_size": world_size,
        "writer": f"gpuprobe {__version__}",
    }
    return json.dumps(header, separators=(",", ":")).encode() + b"\n"


def decode_header(line: bytes, name: str) -> Header:
    """Read a first line. ``name`` is the stream's, for messages.

    Raises NotARecording where it is something else, UnsupportedSchema where it was written by
    a newer major version, DataError where it is damaged.
    """
    try:
        plain = json.loads(line) if len(line) <= _MAX_HEADER else None
    except (ValueError, RecursionError):
        plain = None
    if not isinstance(plain, dict) or plain.get("format") != FORMAT:
        if line.startswith(_START):
            raise DataError(f"{name}: the header of the recording is damaged")
        raise NotARecording(f"{name}: does not begin with the header of a gpuprobe recording")
    version = plain.get("version")
    if not isinstance(version, list) or len(version) != 2:
        raise DataError(f"{name}: the header of the recording has no valid version")
    major, minor = _count(version[0]), _count(version[1])
    if major > SCHEMA_VERSION[0]:
        raise UnsupportedSchema(
            f"{name}: recording format {major}.{minor} is newer than this gpuprobe can read "
            f"(up to {SCHEMA_VERSION[0]}.x)",
            hint="upgrade gpuprobe: pip install -U gpuprobe",
        )
    rank, world_size = _count(plain.get("rank")), _count(plain.get("world_size"))
    if major < 1 or minor < 0 or rank < 0 or world_size < 1:
        raise DataError(f"{name}: the header of the recording is damaged")
    return Header((major, minor), rank, world_size)


def _count(value: Any) -> int:
    """The value where it is a plausible count, else -1."""
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**31:
        return value
    return -1


def looks_like_stream(head: bytes) -> bool:
    """Whether ``head``, the first bytes of a file, may be those of a stream (or a torn one)."""
    return head[: len(_START)] == _START[: len(head)]
