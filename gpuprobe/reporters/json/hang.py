"""Hangs as a JSON document: ``gpuprobe.hang``."""

from __future__ import annotations

from typing import Any, TextIO

from gpuprobe.model.io.document import header
from gpuprobe.model.io.document import write as write_document
from gpuprobe.model.place import Place, SourceLine
from gpuprobe.model.run.jobs import Hang, HangReport, HangSide
from gpuprobe.reporters.json import fields_of
from gpuprobe.reporters.json import schema as load_schema

SCHEMA = "gpuprobe.hang"
VERSION = (1, 1)
"""(major, minor); a minor version only adds keys. History:
* 1.0: first version.
* 1.1: ``communication`` and ``arrivals``.
"""


def write(found: HangReport, stream: TextIO) -> None:
    """Write ``found`` as one JSON document, ASCII only."""
    write_document(document(found), stream)


def document(found: HangReport) -> dict[str, Any]:
    """The findings as plain data."""
    return {
        **header(SCHEMA, VERSION),
        "path": found.path,
        "ranks": list(found.ranks),
        "groups": found.groups,
        "hangs": [_hang(hang) for hang in found.hangs],
        "skipped": list(found.skipped),
        "communication": [
            {**fields_of(row, "op axis ranks dtype count payload wire"), **_place(row.place)}
            for row in found.communication
        ],
        "arrivals": [fields_of(row, "rank collectives last late_ns") for row in found.arrivals],
    }


def schema() -> dict[str, Any]:
    """The JSON Schema (draft 2020-12), as shipped in the package."""
    return load_schema("hang-1")


def _hang(hang: Hang) -> dict[str, Any]:
    return {
        **fields_of(hang, "kind group sequence"),
        "sides": [_side(side) for side in hang.sides],
        "absent": [_side(side) for side in hang.absent],
        "no_dump": list(hang.no_dump),
    }


def _side(side: HangSide) -> dict[str, Any]:
    return {
        "ranks": list(side.ranks),
        **fields_of(side, "op sequence state"),
        **_place(side.place),
    }


def _place(place: SourceLine) -> dict[str, Any]:
    known = place if isinstance(place, Place) else None
    return {
        "file": None if known is None else known.file,
        "line": None if known is None else known.line,
        "function": None if known is None else known.function,
    }
