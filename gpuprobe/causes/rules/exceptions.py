"""Memory in the frames of an exception that is being handled."""

from __future__ import annotations

from gpuprobe.causes.answer import Answer
from gpuprobe.causes.groups import HeldGroup
from gpuprobe.model.run.holders import HolderRoot
from gpuprobe.model.text import human_bytes


def diagnose(group: HeldGroup) -> Answer | None:
    """Memory that the traceback of a handled exception keeps."""
    holder = group.holder
    if holder is None or holder.root is not HolderRoot.EXCEPTION:
        return None
    return Answer(
        "handled-exception",
        f"{human_bytes(group.bytes)} from {group.main.made_at} are kept by {holder.place}: while "
        f"an exception is handled, its traceback keeps the variables in the frame of "
        f"{holder.function or 'each function'} that it ended",
        "only set a flag inside the except block, and try again after it",
    )
