"""Explanations as a JSON document: ``gpuprobe.explain``."""

from __future__ import annotations

from typing import Final

from gpuprobe.model.causes import Explanation
from gpuprobe.reporters.json.documents import Document
from gpuprobe.reporters.json.report import cause_shapes, need_shapes

DOCUMENT: Final = Document(
    "gpuprobe.explain",
    (1, 4),
    Explanation,
    "What the memory at the peak of a program is needed for, what holds the rest, and what changes "
    "without it. Sizes are bytes.",
    shapes={
        **cause_shapes(),
        **need_shapes(),
    },
    added={"1.3": "Effect.bound"},
)

document = DOCUMENT.plain
write = DOCUMENT.write
