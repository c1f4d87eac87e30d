"""Gradients that no optimizer reads, and those that stay after it has read them."""

from __future__ import annotations

from gpuprobe.causes.answer import Answer
from gpuprobe.causes.groups import HeldGroup
from gpuprobe.model.memory import Category
from gpuprobe.model.text import human_bytes


def diagnose(group: HeldGroup) -> Answer | None:
    """Gradients that are computed and never used, or not used again."""
    if not group.mostly(Category.GRADIENT):
        return None
    owner = "" if group.holder is None else f" ({group.holder.place})"
    if group.never_used:
        return Answer(
            "unread-gradients",
            f"{human_bytes(group.bytes)} of gradients{owner} are computed, and nothing reads them",
            "do not compute them: requires_grad_(False) on these tensors, or the part of the model "
            "that makes them under torch.no_grad()",
            code="module.requires_grad_(False)",
        )
    if 2 * sum(block.bytes for block in group.blocks if block.earlier) <= group.bytes:
        return None  # of this step: if there is an optimizer, it has just used them
    return Answer(
        "late-zero-grad",
        f"{human_bytes(group.bytes)} of gradients{owner} of the step before are still there: "
        "the optimizer has used them, and nothing will",
        "free them right after optimizer.step(), before the next forward pass or evaluation",
        code="optimizer.zero_grad(set_to_none=True)",
    )
