"""A serving estimate as a JSON document."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, Final, TextIO

from gpuprobe.model.io.document import header
from gpuprobe.model.io.document import write as write_document
from gpuprobe.model.plans.serving import ServingEstimate

SCHEMA: Final = "gpuprobe.serving"
VERSION: Final = (1, 0)
"""(major, minor); a minor version only adds keys.

History:
* 1.0: first version. ``schemas/serving-1.json``.
"""


def document(estimate: ServingEstimate) -> dict[str, Any]:
    """The estimate as plain data. Sizes are bytes; null: vLLM failed before."""
    return {
        **header(SCHEMA, VERSION),
        **asdict(estimate),
        "advice": list(estimate.advice),
        "assumed": list(estimate.assumed),
        "peak": [asdict(row) for row in estimate.peak],
    }


def write(estimate: ServingEstimate, stream: TextIO) -> None:
    """Write one JSON document, ASCII only."""
    write_document(document(estimate), stream)
