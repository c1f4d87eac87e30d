"""A serving estimate as a JSON document."""

from __future__ import annotations

from typing import Final

from gpuprobe.model.plans.serving import PeakLine, ServingEstimate, RankMemory
from gpuprobe.reporters.json.documents import Document

DOCUMENT: Final = Document(
    "gpuprobe.serving",
    (1, 1),
    ServingEstimate,
    "A vLLM that was started without a GPU. Sizes are bytes; null: vLLM failed before.",
    title="gpuprobe estimate of a vLLM server",
    closed={PeakLine, RankMemory},
)
"""History:
* 1.0: first version. ``schemas/serving-1.json``.
* 1.1: ``graph_nodes``, ``ranks``, ``unquantized``.
"""

document = DOCUMENT.plain
write = DOCUMENT.write
