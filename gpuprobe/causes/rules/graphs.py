"""Autograd graphs that a variable or a container keeps, with all that they saved."""

from __future__ import annotations

from gpuprobe.causes.answer import EXPECTED, Answer, EditKind, Expected
from gpuprobe.causes.groups import OF_A_MODEL, HeldGroup
from gpuprobe.causes.lines import retaining_line
from gpuprobe.causes.wording import kept_in
from gpuprobe.model.run.holders import Holder, HolderRoot, Kept
from gpuprobe.model.text import human_bytes
from gpuprobe.remedies.text import ProgramText
from gpuprobe.user_frames import Owner, owner_of

OF_THIS_CALL = "evaluation-with-graph"
"""The rule of graphs of a call in progress."""


KEPT_GRAPHS = "kept-graphs"
"""The rule of graphs that the tensors in a container keep."""


def diagnose(group: HeldGroup) -> Answer | Expected | None:
    """Memory that was saved for backward passes which do not come. If one does that does not read
    what was saved for it, `unread_saved` knows why.
    """
    holder = group.holder
    if holder is None:
        return None
    nameless = holder.kept is Kept.GRAD and holder.root is HolderRoot.OUTSIDE
    if holder.kept not in (Kept.SAVED, Kept.VARIABLE) and not nameless:
        return None
    if 2 * sum(b.bytes for b in group.blocks if b.freed_in_backward) >= group.bytes:
        return EXPECTED
    size = human_bytes(group.bytes)
    of_gradients = any(step.label == ".grad" for step in holder.path)
    if of_gradients or nameless or _of_weights(holder):
        owner = f"{_name(holder)} and its graph" if of_gradients else "gradients and their graphs"
        return Answer(
            "gradient-graph",
            f"{size} are kept by autograd graphs of gradients: after backward(create_graph=True), "
            f"{owner} refer to each other",
            "compute these gradients with torch.autograd.grad(..., create_graph=True), which "
            "stores none in .grad; or set .grad to None after their last use",
            code="torch.autograd.grad(loss, parameters, create_graph=True)",
            edit=EditKind.AUTOGRAD_GRAD,
        )
    if group.mostly(*OF_A_MODEL):
        return EXPECTED
    nameless = holder.root is HolderRoot.OUTSIDE
    if nameless and any(block.earlier for block in group.blocks):
        return None  # what keeps it is unknown
    if nameless and _by_autograd_grad(group):
        return Answer(
            OF_THIS_CALL,
            f"{size} from {group.main.made_at} are saved for a backward pass, and none comes: "
            "torch.autograd.grad made a graph of the gradients",
            "pass create_graph=True only where a loss is computed from the gradients",
            code="create_graph=model.training",
        )
    if nameless or _is_of_this_call(group, holder):
        return Answer(
            OF_THIS_CALL,
            f"{size} from {group.main.made_at} are saved for a backward pass, and none of this "
            "forward pass comes",
            "run it under torch.no_grad()",
            code="with torch.no_grad():",
            edit=EditKind.NO_GRAD,
        )
    if holder.container is not None:
        return kept_in_container(group, holder)
    return Answer(
        "kept-graph",
        f"{size} are saved for a backward pass that does not come: {holder.place} keeps the "
        "autograd graph that it was computed by",
        "keep it without its graph: .detach(), or .item() for a number",
        code=".detach()",
        edit=EditKind.DETACH,
    )


def kept_in_container(group: HeldGroup, holder: Holder, backward: str = "") -> Answer:
    """The answer for graphs of several tensors. ``backward``: the place of the backward pass of one
    of them, if the same lines may store that: without its graph, nothing would be trained.
    """
    size, place = human_bytes(group.bytes), kept_in(holder)
    saved = f"{size} are saved for backward passes that do not come"
    if backward:
        return Answer(
            KEPT_GRAPHS,
            f"{saved}: tensors in {place} keep their autograd graphs, not only the one of which "
            "the backward pass comes",
            "store those of which none comes without their graphs (.detach()). Not all of them: "
            f"{backward} runs the backward pass of one",
            edit=EditKind.DETACH,
        )
    return Answer(
        KEPT_GRAPHS,
        f"{saved}: each tensor in {place} keeps its autograd graph",
        "store it without its graph: .detach(), or .item() for a number",
        code=".detach()",
        edit=EditKind.DETACH,
    )


def retained(group: HeldGroup, text: ProgramText) -> Answer | None:
    """Memory that a backward pass has used and, by an argument in the file ``text``, not freed."""
    holder = group.holder
    if holder is None or holder.kept is not Kept.SAVED or not holder.path:
        return None
    phase = group.main.phase
    if not phase.startswith("backward") and (phase or not group.main.earlier):
        return None  # of one of an earlier step, this trace does not have the last use
    name = "".join(step.label for step in holder.path if step.label != ".grad_fn")
    line = retaining_line(text, name)
    if not line:
        return None
    return Answer(
        "retained-graph",
        f"{human_bytes(group.bytes)} were saved for a backward pass, which has used them: "
        f"{name}.backward(retain_graph=True) at line {line} keeps the graph as long as "
        f"{holder.place} exists",
        "call it without retain_graph=True, at least the last time: the graph is freed as it is "
        "used; or delete all that refers to this loss after it",
        code=f"{name}.backward()",
        edit=EditKind.RETAIN_GRAPH,
    )


def _by_autograd_grad(group: HeldGroup) -> bool:
    """Whether `torch.autograd.grad` made it."""
    return any(
        frame.name == "grad"
        and frame.filename.replace("\\", "/").endswith("torch/autograd/__init__.py")
        for frame in group.main.frames
    )


def _of_weights(holder: Holder) -> bool:
    """Whether graphs that no name leads to accumulate into the memory: into weights that have
    gradients with these graphs.
    """
    return holder.root is HolderRoot.OUTSIDE and holder.kept is Kept.VARIABLE


def _name(holder: Holder) -> str:
    return holder.name.partition(".grad_fn")[0]


def _is_of_this_call(group: HeldGroup, holder: Holder) -> bool:
    """Whether only a call in progress holds it: a variable of a library's function is the tensor
    whose graph has it, and all was made in this step.
    """
    library = owner_of(holder.file) in (Owner.LIBRARY, Owner.TORCH)
    steps = [step for step in holder.path if step.label not in (".grad_fn", ".grad")]
    own = holder.root is HolderRoot.LOCAL and len(steps) == 1 and holder.container is None
    return library and own and not any(block.earlier for block in group.blocks)
