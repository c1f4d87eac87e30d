"""The report as JSON."""

from __future__ import annotations

import json
from importlib import resources
from typing import Any, TextIO

__all__ = ["schema", "write"]


def write(report: dict[str, Any], stream: TextIO) -> None:
    """Write ``report`` (from `gpuprobe.report`) as one JSON document, ASCII only."""
    json.dump(report, stream, indent=2, allow_nan=False)
    stream.write("\n")


def schema() -> dict[str, Any]:
    """The JSON Schema (draft 2020-12) of the report, as shipped in the package."""
    file = resources.files("gpuprobe.reporters.json") / "schemas" / "report-1.json"
    loaded: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return loaded
