"""Gradients that no optimizer reads."""

from __future__ import annotations

from gpuprobe.causes.answer import Answer
from gpuprobe.causes.groups import HeldGroup
from gpuprobe.model.memory import Category
from gpuprobe.model.run.holders import Kept
from gpuprobe.model.text import human_bytes


def diagnose(group: HeldGroup) -> Answer | None:
    """Gradients that are computed and never used: their tensors are in no optimizer."""
    of_gradients = group.mostly(Category.GRADIENT) or (
        group.holder is not None and group.holder.kept is Kept.GRAD
    )
    if not of_gradients or not group.never_used:
        return None
    owner = "" if group.holder is None else f" ({group.holder.place})"
    return Answer(
        "unread-gradients",
        f"{human_bytes(group.bytes)} of gradients{owner} are computed, and nothing reads them",
        "do not compute them: requires_grad_(False) on these tensors, or the part of the model "
        "that makes them under torch.no_grad()",
        code="module.requires_grad_(False)",
    )
