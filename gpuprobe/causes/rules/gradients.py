"""Gradients that no optimizer reads, and those that stay after it has read them."""

from __future__ import annotations

from gpuprobe.causes.answer import EXPECTED, Answer, EditKind, Expected
from gpuprobe.causes.groups import HeldGroup
from gpuprobe.model.memory import Category
from gpuprobe.model.run.holders import HolderRoot, Kept
from gpuprobe.model.text import human_bytes

LATE_GRADIENTS = "late-zero-grad"
"""The rule of gradients that are freed after the next forward pass has begun."""


def diagnose(group: HeldGroup) -> Answer | Expected | None:
    """Gradients that are computed and never used, or not used again."""
    holder = group.holder
    if not group.mostly(Category.GRADIENT) or _of_a_graph(group):
        return None
    # The keys of an optimizer's state are the parameters, but not by their names.
    named = holder is not None and not any("→" in step.label for step in holder.path)
    owner = f" ({holder.place})" if holder is not None and named else ""
    idle = sum(b.bytes for b in group.blocks if b.earlier and not b.phase)
    if 2 * idle > group.bytes:
        return Answer(
            LATE_GRADIENTS,
            f"{human_bytes(group.bytes)} of gradients{owner} of an earlier step are still there, "
            "and nothing uses them",
            "free them after the last step of their optimizer, or drop its model",
            code="optimizer.zero_grad(set_to_none=True)",
            edit=EditKind.FREE_GRADIENTS,
        )
    if group.never_used:
        return Answer(
            "unread-gradients",
            f"{human_bytes(group.bytes)} of gradients{owner} are computed, and nothing reads them",
            "do not compute them: requires_grad_(False) on these tensors, or the part of the model "
            "that makes them under torch.no_grad()",
            code="module.requires_grad_(False)",
        )
    if 2 * sum(block.bytes for block in group.blocks if block.earlier) <= group.bytes:
        # Of this step. The optimizer has just used them; until it zeroes them they are .grad.
        used = sum(b.bytes for b in group.blocks if b.phase.partition("/")[0] == "optimizer")
        return EXPECTED if 2 * used > group.bytes else None
    return Answer(
        LATE_GRADIENTS,
        f"{human_bytes(group.bytes)} of gradients{owner} of the step before are still there: "
        "the optimizer has used them, and nothing will",
        "free them right after optimizer.step(), before the next forward pass or evaluation",
        code="optimizer.zero_grad(set_to_none=True)",
        edit=EditKind.FREE_GRADIENTS,
    )


def _of_a_graph(group: HeldGroup) -> bool:
    """Whether no name leads to the tensors of gradients of earlier steps: no optimizer has them."""
    holder = group.holder
    if holder is None or holder.root is not HolderRoot.OUTSIDE or holder.kept is Kept.TENSOR:
        return False
    return all(block.earlier for block in group.blocks)
