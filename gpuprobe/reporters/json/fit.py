"""The largest value that fits, as a JSON document."""

from __future__ import annotations

from typing import Any, Final, TextIO

from gpuprobe.model.io.document import header
from gpuprobe.model.io.document import write as write_document
from gpuprobe.model.plans.fit import Fit, Trial
from gpuprobe.reporters.json import fields_of

SCHEMA: Final = "gpuprobe.fit"
VERSION: Final = (2, 2)
"""(major, minor); a minor version only adds keys.

History:
* 1.0: first version.
* 2.0: with all documents; nothing changed in this one. ``schemas/fit-2.json``.
* 2.1: ``interrupted``.
* 2.2: ``ranks`` and ``choices``.
"""


def document(fit: Fit) -> dict[str, Any]:
    """The answer as plain data. Sizes are bytes."""
    return {
        **header(SCHEMA, VERSION),
        **fields_of(fit, "gpu capacity ranks argument applied compute"),
        "searched": {"from": fit.least, "to": fit.most},
        "largest": fit.largest,
        "trials": [_trial(trial) for trial in fit.trials],
        "suggestions": [
            {
                "name": row.name,
                "how": row.how,
                "needed_before": row.before,
                "needed_after": row.after,
                "saved": row.saved,
                "largest": row.largest,
            }
            for row in fit.suggestions
        ],
        "not_tried": list(fit.not_tried),
        "unusual": list(fit.unusual),
        "interrupted": fit.interrupted,
        "choices": [
            {
                **fields_of(row, "gpu ranks largest total needed capacity"),
                "failed": row.failed or None,
            }
            for row in fit.choices
        ],
    }


def _trial(trial: Trial) -> dict[str, Any]:
    if trial.failed:
        return {"value": trial.value, "failed": trial.failed}
    return fields_of(trial, "value verdict peak_allocated needed")


def write(fit: Fit, stream: TextIO) -> None:
    """Write one JSON document, ASCII only."""
    write_document(document(fit), stream)
