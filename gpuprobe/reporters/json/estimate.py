"""An estimate as a JSON document."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, TextIO

from gpuprobe.model.io.document import header
from gpuprobe.model.io.document import write as write_document
from gpuprobe.model.plans.estimate import Estimate, EstimateShare
from gpuprobe.reporters.json import fields_of

SCHEMA: Final = "gpuprobe.estimate"
VERSION: Final = (2, 0)
"""(major, minor); a minor version only adds keys.

History:
* 1.0: first version.
* 2.0: with all documents; nothing changed in this one. ``schemas/estimate-2.json``.
"""


def document(estimate: Estimate) -> dict[str, Any]:
    """The estimate as plain data. Sizes are bytes."""
    return {
        **header(SCHEMA, VERSION),
        **fields_of(estimate, "gpu devices ranks steps settings verdict fits capacity"),
        **fields_of(estimate, "peak_allocated peak_reserved"),
        "reserved": {"at_least": estimate.reserved_low, "at_most": estimate.reserved_high},
        "context": {"at_least": estimate.context_low, "at_most": estimate.context_high},
        "total": {"at_least": estimate.total_low, "at_most": estimate.total_high},
        "attributed": estimate.attributed,
        "by_category": _rows(estimate.by_category),
        "by_module": _rows(estimate.by_module),
        "by_line": _rows(estimate.by_line),
        "assumed": list(estimate.assumed),
        "not_modelled": list(estimate.not_modelled),
    }


def _rows(shares: Sequence[EstimateShare]) -> list[dict[str, Any]]:
    return [{"name": share.name, "bytes": share.bytes} for share in shares]


def write(estimate: Estimate, stream: TextIO) -> None:
    """Write one JSON document, ASCII only."""
    write_document(document(estimate), stream)
