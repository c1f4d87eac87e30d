"""Jobs of several ranks as JSON documents: speed on more ranks."""

from __future__ import annotations

from typing import Final

from gpuprobe.model.run.jobs import Scaling
from gpuprobe.reporters.json.documents import Document

SCALING: Final = Document(
    "gpuprobe.scale",
    (1, 2),
    Scaling,
    "Speed on different numbers of ranks. Times are nanoseconds of one rank for one unit of work; "
    "losses are shares of total_ns and sum to lost.",
)
"""History:
* 1.0: first version.
* 1.1: ``predicted``.
* 1.2: ``rows.*.recorded``.
"""
