"""The largest value that fits, as a JSON document."""

from __future__ import annotations

import json
from typing import Any, Final, TextIO

from gpuprobe._version import __version__
from gpuprobe.model.plans.fit import Fit, Trial

__all__ = ["VERSION", "document", "write"]

VERSION: Final = (1, 0)
"""(major, minor); a minor version only adds keys.

History:
* 1.0: first version.
"""


def document(fit: Fit) -> dict[str, Any]:
    """The answer as plain data. Sizes are bytes."""
    return {
        "schema": "gpuprobe.fit",
        "version": list(VERSION),
        "gpuprobe": __version__,
        "gpu": fit.gpu,
        "capacity": fit.capacity,
        "argument": fit.argument,
        "applied": fit.applied,
        "compute": fit.compute,
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
    }


def _trial(trial: Trial) -> dict[str, Any]:
    if trial.failed:
        return {"value": trial.value, "failed": trial.failed}
    return {
        "value": trial.value,
        "verdict": trial.verdict,
        "peak_allocated": trial.peak_allocated,
        "needed": trial.needed,
    }


def write(fit: Fit, stream: TextIO) -> None:
    """Write one JSON document, ASCII only."""
    json.dump(document(fit), stream, indent=2, allow_nan=False)
    stream.write("\n")
