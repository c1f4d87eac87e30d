"""Estimates on several GPUs as a JSON document. Sizes are bytes, times nanoseconds."""

from __future__ import annotations

from typing import Final

from gpuprobe.model.plans.gpu_table import GpuTable
from gpuprobe.reporters.json.documents import Document

DOCUMENT: Final = Document(
    "gpuprobe.gpus",
    (1, 0),
    GpuTable,
    "A training run on several GPUs: which hold it, how long a step takes there, and what it "
    "costs. Sizes are bytes, times nanoseconds.",
)
"""History: 1.0: first version."""

document = DOCUMENT.plain
write = DOCUMENT.write
