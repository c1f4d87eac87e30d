"""Scaling as a JSON document: ``gpuprobe.scale``. Times are integers in nanoseconds."""

from __future__ import annotations

from typing import Any, TextIO

from gpuprobe.model.io.document import header
from gpuprobe.model.io.document import write as write_document
from gpuprobe.model.run.jobs import Scaling
from gpuprobe.reporters.json import fields_of
from gpuprobe.reporters.json import schema as load_schema

SCHEMA = "gpuprobe.scale"
VERSION = (1, 0)
"""(major, minor); a minor version only adds keys. History: 1.0: first version."""

_ROW = (
    "name ranks steps total_ns own_ns communication_ns waiting_ns throughput speedup efficiency "
    "lost lost_own lost_communication lost_waiting"
)


def write(found: Scaling, stream: TextIO) -> None:
    """Write ``found`` as one JSON document, ASCII only."""
    write_document(document(found), stream)


def document(found: Scaling) -> dict[str, Any]:
    """The scaling as plain data."""
    rows = [fields_of(row, _ROW) for row in found.rows]
    return {**header(SCHEMA, VERSION), "work": found.work, "rows": rows}


def schema() -> dict[str, Any]:
    """The JSON Schema (draft 2020-12), as shipped in the package."""
    return load_schema("scale-1")
