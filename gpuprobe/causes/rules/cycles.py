"""Reference cycles: memory that waits for Python's garbage collector."""

from __future__ import annotations

from gpuprobe.causes.answer import Answer, EditKind
from gpuprobe.causes.groups import HeldGroup
from gpuprobe.model.run.holders import HolderRoot
from gpuprobe.model.text import human_bytes


def diagnose(group: HeldGroup) -> Answer | None:
    """Memory of objects that only refer to one another."""
    holder = group.holder
    if holder is None or holder.root is not HolderRoot.CYCLE:
        return None
    remedy = (
        "break the cycle: let one of these objects not refer to the next (for a custom autograd "
        "function: ctx.save_for_backward instead of an attribute), or use a weakref"
    )
    if any(one.label == ".__traceback__" for one in holder.cycle):
        remedy = (
            "keep the message of the exception, not the exception (its traceback keeps all "
            "variables of the functions that it ended), or clear its traceback: "
            "error.with_traceback(None)"
        )
    ring = " → ".join(f"{one.kind}{one.label}" for one in holder.cycle)
    return Answer(
        "cycle",
        f"{human_bytes(group.bytes)} from {group.main.made_at} wait for the garbage collector: a "
        f"reference cycle keeps them ({ring})",
        remedy,
        edit=EditKind.COLLECT,
    )
