"""Losses that are one number and keep the memory of all elements that they were computed from."""

from __future__ import annotations

from typing import Final

from gpuprobe.causes.answer import Answer
from gpuprobe.causes.groups import HeldGroup
from gpuprobe.causes.wording import kept_in
from gpuprobe.model.run.holders import HolderRoot
from gpuprobe.model.text import human_bytes

_WHOLE: Final = frozenset(("mse_loss", "smooth_l1_loss", "binary_cross_entropy"))
"""Operators that compute a loss for each element in the memory of their result, and then the mean
in the same memory: ``F.mse_loss(a, b).untyped_storage().nbytes()`` is that of ``a`` (read in
torch 2.13)."""


def diagnose(group: HeldGroup) -> Answer | None:
    """Results of such losses that a name keeps."""
    holder = group.holder
    if holder is None or holder.root is HolderRoot.OUTSIDE or not holder.path:
        return None
    if not group.mostly_made_by(_WHOLE) or len(group.blocks) < 2:
        return None
    return Answer(
        "kept-tensors",
        f"{human_bytes(group.bytes)} from {group.main.made_at} are kept by {kept_in(holder)}: "
        f"results of {group.main.made_by}, each of which is one number in the memory of all "
        "elements that it was computed from",
        "keep numbers (loss.item()), or copies (loss.detach().clone()): .detach() alone keeps "
        "the memory",
        code=".detach().clone()",
    )
