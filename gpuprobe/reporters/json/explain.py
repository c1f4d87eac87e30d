"""Explanations as a JSON document: ``gpuprobe.explain``."""

from __future__ import annotations

from dataclasses import fields
from typing import Final

from gpuprobe.model.causes import Explanation, MemoryCause
from gpuprobe.reporters.json.documents import Document, keys
from gpuprobe.reporters.json.report import CodeLine, code_line, need_shapes


def _made_at(cause: MemoryCause) -> CodeLine:
    return code_line(cause.made_at)


def _last_use(cause: MemoryCause) -> CodeLine | None:
    return None if cause.last_use is None else code_line(cause.last_use)


def _kept_at(cause: MemoryCause) -> CodeLine | None:
    return None if cause.kept_at is None else code_line(cause.kept_at)


def _holder(cause: MemoryCause) -> str | None:
    """The holder in words."""
    return None if cause.holder is None else cause.holder.text


DOCUMENT: Final = Document(
    "gpuprobe.explain",
    (1, 1),
    Explanation,
    "What the memory at the peak of a program is needed for, what holds the rest, and what changes "
    "without it. Sizes are bytes.",
    shapes={
        MemoryCause: {
            **keys(" ".join(field.name for field in fields(MemoryCause))),
            "made_at": _made_at,
            "last_use": _last_use,
            "kept_at": _kept_at,
            "holder": _holder,
        },
        **need_shapes(),
    },
)
"""History:
* 1.0: first version.
* 1.1: ``failed``, ``searched``; of effects ``assumed`` and ``reserved``.
"""

document = DOCUMENT.plain
write = DOCUMENT.write
