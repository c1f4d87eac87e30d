"""Tensors that a variable, an attribute or a container of the program keeps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Final

from gpuprobe.causes.answer import Answer, EditKind
from gpuprobe.causes.groups import HeldBlock, HeldGroup
from gpuprobe.causes.wording import kept_in
from gpuprobe.model.run.holders import Holder, HolderRoot, Kept
from gpuprobe.model.text import human_bytes
from gpuprobe.remedies.edits import ReleasePart
from gpuprobe.user_frames import is_user_file

LIVE_VARIABLE = "live-variable"
LEAST_OF_A_STEP: Final = 0.2
"""The share of the tensors from which a variable of the same step is a cause: a loop or function
keeps its variables until it ends, and programs that need all their memory have some of a sixth."""
_GROWING: Final = frozenset(
    ("list", "dict", "set", "deque", "defaultdict", "OrderedDict", "Counter", "ModuleDict")
)


def diagnose(group: HeldGroup) -> Answer | None:
    """Memory with a path from a name of the program."""
    holder = group.holder
    if holder is None or holder.root in (HolderRoot.OUTSIDE, HolderRoot.AUTOCAST):
        return None
    if holder.kept is Kept.GRAD:
        return None  # gradients live from the backward pass to zero_grad
    if holder.root is HolderRoot.LOCAL and not is_user_file(holder.file):
        return None  # an argument of a library's call in progress
    used = "never used" if group.never_used else "not used again"
    size, main = human_bytes(group.bytes), group.main
    if holder.root is HolderRoot.CACHE:
        of_object = _is_of_an_object(holder)
        return Answer(
            "cached-results",
            f"{size} from {main.made_at} are {used} and kept by "
            + (f"the functools.cache of {holder.via}" if of_object else holder.place),
            "do not cache a method: the cache keeps its object as an argument, whatever its size. "
            "Keep the result in an attribute of the object (functools.cached_property)"
            if of_object
            else "limit the cache (maxsize), or do not cache tensors: a cache of a method keeps "
            "its object, too",
            code="" if of_object else "@functools.lru_cache(maxsize=1)",
            edit=EditKind.NONE if of_object else EditKind.LIMIT_CACHE,
        )
    result = _is_result(group, holder)
    if not result and (holder.container is not None or len(holder.path) > 1):
        return Answer(
            "kept-tensors",
            f"{size} from {main.made_at} are {used} and kept by {_kept_by(group, holder)}",
            "drop what is not needed any more, or keep copies on the CPU (.detach().cpu()"
            + (" of each tensor)" if _in_parts(holder) else ")"),
            code="" if _in_parts(holder) else ".detach().cpu()",
            edit=EditKind.TO_CPU,
        )
    if not holder.path or (main.phase == "backward" and not main.earlier):
        return None  # the backward pass that runs has just used it
    if not main.earlier and group.share < LEAST_OF_A_STEP and not result:
        return None
    name = holder.path[0].label
    last = "" if main.last_use is None else f", last used at {main.last_use}"
    part = holder.part if 2 * main.bytes > group.bytes else ""
    release = ReleasePart(0, part, holder.of_named_tuple).code if part else f"del {name}"
    return Answer(
        LIVE_VARIABLE,
        f"{size} from {main.made_at} are {used}{last}: the variable {_variable(holder, name)} "
        "keeps them" + (f", as {part}" if part else ""),
        f"release it after its last use: {release}, or del {name} where no other part of it is "
        "needed"
        if part and not holder.of_object
        else f"release it after its last use: {release}"
        if part
        else f"delete it after its last use: {release}",
        code=release,
        edit=EditKind.DELETE,
    )


def late_variable(blocks: Iterable[HeldBlock], holders: Mapping[int, Holder]) -> str:
    """The variable that keeps the most of what is not used again, with the bytes; "" if none is
    known.
    """
    kept: Counter[str] = Counter()
    for block in blocks:
        holder = holders.get(block.row)
        if holder is None or not block.need.needless or not holder.path:
            continue
        local = holder.root is HolderRoot.LOCAL and is_user_file(holder.file)
        if (local or holder.root is HolderRoot.GLOBAL) and holder.kept is Kept.TENSOR:
            kept[_variable(holder, holder.path[0].label)] += block.bytes
    for name, size in kept.most_common(1):
        return f"{human_bytes(size)} of them kept by the variable {name}"
    return ""


def _is_of_an_object(holder: Holder) -> bool:
    """Whether a path goes from a cache through the first argument of a call to its attributes."""
    labels = [step.label for step in holder.path[1:3]]
    return len(labels) == 2 and labels[0] == "[0]" and labels[1].startswith(".")


def _in_parts(holder: Holder) -> bool:
    """Whether the elements of the container are containers of tensors, too."""
    return (
        holder.container is not None and holder.path.index(holder.container) < len(holder.path) - 2
    )


def _kept_by(group: HeldGroup, holder: Holder) -> str:
    """What keeps a group: of an object without a container, such as a model, the path to one
    of them.
    """
    several = len(group.blocks)
    if several == 1 or holder.container is not None or len(holder.path) < 2:
        return kept_in(holder)
    return f"{holder.path[0].label}: {several:,} tensors, such as {holder.place}"


def _is_result(group: HeldGroup, holder: Holder) -> bool:
    """Whether a variable has an object of several parts that were made one by one, such as what a
    model returns: it is replaced as a whole. What grows has parts that one line made.
    """
    if not holder.path or holder.root not in (HolderRoot.LOCAL, HolderRoot.GLOBAL):
        return False
    first = holder.path[0]
    if first.size is None and (not holder.part or first.label in ("self", "cls")):
        return False
    made = {block.frames for block in group.blocks}
    return first.kind not in _GROWING and len(made) == len(group.blocks)


def _variable(holder: Holder, name: str) -> str:
    return f"{name} in {holder.function}" if holder.function else name
