"""Reference cycles: memory that waits for Python's garbage collector."""

from __future__ import annotations

from typing import Final

from gpuprobe.causes.answer import Answer, EditKind
from gpuprobe.causes.groups import HeldGroup
from gpuprobe.model.run.holders import Holder, HolderRoot
from gpuprobe.model.text import human_bytes


def diagnose(group: HeldGroup) -> Answer | None:
    """Memory of objects that only refer to one another."""
    holder = group.holder
    if holder is not None and holder.of_node_hooks:
        return _by_hooks(group, holder)
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


def _by_hooks(group: HeldGroup, holder: Holder) -> Answer:
    """Memory that hooks of autograd keep, to which no name leads: a node of C++ refers to its hooks
    where the collector does not see it.
    """
    at = max((at for at, step in enumerate(holder.path) if _is_own(step.kind)), default=0)
    labels = [step.label for step in holder.path[at + 1 :]]
    graph = next((at for at, label in enumerate(labels) if label.startswith(".grad_fn")), None)
    kept = "".join((holder.path[at].kind, *labels[:graph]))
    return Answer(
        "cycle",
        f"{human_bytes(group.bytes)} from {group.main.made_at} are kept by a hook of autograd's "
        f"graph, which refers to {kept}; no name leads to either. If that tensor's own graph has "
        "the hook, this is a reference cycle: the garbage collector never frees it, because the "
        "graph is no object of Python",
        "let the hook refer to its object weakly (weakref.ref, weakref.WeakMethod), or remove it "
        "(handle.remove() of what register_hook returned)",
        code="weakref.WeakMethod(self.method)",
    )


_CONTAINERS: Final = frozenset(("OrderedDict", "dict", "list", "tuple", "set", "deque", "cell"))
_CALLED: Final = frozenset(("partial", "function", "method"))
_TENSORS: Final = frozenset(("Tensor", "Parameter"))


def _is_own(kind: str) -> bool:
    """Whether a type is the program's, by its name."""
    return kind not in _CONTAINERS | _CALLED | _TENSORS and "Backward" not in kind
