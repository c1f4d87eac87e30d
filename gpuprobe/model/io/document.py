"""The header that every JSON document begins with, and writing and checking documents.

A document is an object whose first keys are ``schema`` (what it is), ``version`` (``[major,
minor]``; a newer minor version only adds keys) and ``gpuprobe`` (the version that wrote it). The
history of each schema is next to its version constant.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import IO

from gpuprobe._version import __version__
from gpuprobe.errors import DataError, UnsupportedSchema


def header(schema: str, version: tuple[int, int]) -> dict[str, object]:
    """The first keys of a document."""
    return {"schema": schema, "version": list(version), "gpuprobe": __version__}


def check_version(
    document: Mapping[str, object],
    newest: tuple[int, int],
    where: str,
    *,
    hint: str = "",
) -> tuple[int, int]:
    """The version in the header of a document that was read; ``where`` begins the messages,
    ``hint`` is what to do with a damaged document.

    Raises UnsupportedSchema if its major version is newer than ``newest``, or older, which only
    pre-releases wrote; DataError if there is no valid version.
    """
    version = document.get("version")
    if (
        not isinstance(version, list)
        or len(version) != 2
        or not all(type(part) is int and 0 <= part < 1 << 31 for part in version)
        or version[0] < 1
    ):
        raise DataError(f"{where} is damaged: it has no valid version", hint=hint)
    major, minor = version
    if major > newest[0]:
        raise UnsupportedSchema(
            f"{where}: version {major}.{minor} is newer than this gpuprobe can read "
            f"(up to {newest[0]}.x)",
            hint="upgrade gpuprobe: pip install -U gpuprobe",
        )
    if major < newest[0]:
        raise UnsupportedSchema(
            f"{where}: version {major}.{minor} was written by a pre-release of gpuprobe", hint=hint
        )
    return major, minor


def write(document: object, stream: IO[str]) -> None:
    """Write one document, indented, ASCII only: no terminal and no encoding can break it. Nor does
    a CI service execute what is in it: its runner takes ``##[name]`` and ``##vso[name]`` for
    commands wherever they are printed, so that the first of two ``#`` is escaped.
    """
    import json  # 2 ms

    for part in json.JSONEncoder(indent=2, allow_nan=False).iterencode(document):
        stream.write(_TWO.sub(r"\\u0023", part) if "##" in part else part)
    stream.write("\n")


_TWO = re.compile("#(?=#)")
