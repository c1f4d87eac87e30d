"""Autocast's cache of converted weights."""

from __future__ import annotations

from gpuprobe.causes.answer import Answer
from gpuprobe.causes.groups import HeldGroup
from gpuprobe.model.run.holders import HolderRoot
from gpuprobe.model.text import human_bytes


def diagnose(group: HeldGroup) -> Answer | None:
    """Converted weights that autocast caches until its outermost context ends."""
    holder = group.holder
    if holder is None or holder.root is not HolderRoot.AUTOCAST:
        return None
    return Answer(
        "autocast-cache",
        f"{human_bytes(group.bytes)} are weights that autocast has converted and keeps until its "
        "outermost context ends",
        "end the context after each forward pass, or do not cache: "
        "torch.autocast(..., cache_enabled=False)",
        code='torch.autocast("cuda", cache_enabled=False)',
    )
