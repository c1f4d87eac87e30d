"""The state of an optimizer that makes no step any more."""

from __future__ import annotations

from typing import Final

from gpuprobe.causes.answer import Answer
from gpuprobe.causes.groups import HeldGroup
from gpuprobe.model.memory import Category
from gpuprobe.model.run.holders import HolderRoot
from gpuprobe.model.text import human_bytes

_NAMES: Final = (HolderRoot.LOCAL, HolderRoot.GLOBAL)


def diagnose(group: HeldGroup) -> Answer | None:
    """Optimizer state that nothing uses again."""
    if not group.mostly(Category.OPTIMIZER_STATE) or group.holder is None:
        return None
    if group.holder.root is HolderRoot.CACHE:
        return None  # nothing of the program refers to the optimizer
    return Answer(
        "stale-optimizer-state",
        f"{human_bytes(group.bytes)} are the state of an optimizer that makes no step again: "
        f"{group.holder.place}",
        "delete the optimizer (and what else refers to it) after its last step",
        code=f"del {group.holder.path[0].label}" if group.holder.root in _NAMES else "",
    )
