"""Estimates of servers, and searches with them, as JSON documents."""

from __future__ import annotations

from typing import Final

from gpuprobe.model.plans.serving import (
    ServingEstimate,
    ServingFit,
)
from gpuprobe.reporters.json.documents import Document

DOCUMENT: Final = Document(
    "gpuprobe.serving",
    (1, 3),
    ServingEstimate,
    "A vLLM that was started without a GPU. Sizes are bytes; null: vLLM failed before.",
    title="gpuprobe estimate of a vLLM server",
    added={
        "1.1": "graph_nodes ranks unquantized",
        "1.2": "compiling later",
        "1.3": "graphs_reserved",
    },
)

FIT: Final = Document(
    "gpuprobe.serving-fit",
    (1, 0),
    ServingFit,
    "How far a vLLM deployment goes, by starts without a GPU. Sizes are bytes; null: it failed.",
    title="gpuprobe fit of a vLLM server",
)

document = DOCUMENT.plain
write = DOCUMENT.write
fit_document = FIT.plain
