"""Memory that is not needed, and that no name of the program leads to."""

from __future__ import annotations

from gpuprobe.causes.answer import Answer
from gpuprobe.causes.groups import HeldGroup
from gpuprobe.model.text import human_bytes

_LEAST = 0.2
"""The share of the peak: autograd frees some memory later than it could."""


def diagnose(group: HeldGroup) -> Answer | None:
    """A large part of the peak, held by a library or by C++."""
    if group.holder is not None and group.holder.path:
        return None
    if group.share < _LEAST:
        return None
    why = "nothing in Python was found to hold them"
    if group.holder is None:
        why = "what holds them is unknown"
    used = "never used" if group.never_used else "not used again"
    return Answer(
        "unheld",
        f"{human_bytes(group.bytes)} from {group.main.made_at} are {used}; {why}",
        "",
    )
