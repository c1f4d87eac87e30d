"""A serving estimate as a JSON document."""

from __future__ import annotations

from typing import Final

from gpuprobe.model.plans.serving import PeakLine, ServingEstimate
from gpuprobe.reporters.json.documents import Document

DOCUMENT: Final = Document(
    "gpuprobe.serving",
    (1, 0),
    ServingEstimate,
    "A vLLM that was started without a GPU. Sizes are bytes; null: vLLM failed before.",
    title="gpuprobe estimate of a vLLM server",
    closed={PeakLine},
)
"""History:
* 1.0: first version. ``schemas/serving-1.json``.
"""

document = DOCUMENT.plain
write = DOCUMENT.write
