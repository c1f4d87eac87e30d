"""Tensors that a variable, an attribute or a container of the program keeps."""

from __future__ import annotations

from typing import Final

from gpuprobe.causes.answer import Answer, EditKind
from gpuprobe.causes.groups import HeldGroup
from gpuprobe.causes.wording import kept_in
from gpuprobe.model.run.holders import Holder, HolderRoot, Kept
from gpuprobe.model.text import human_bytes
from gpuprobe.user_frames import is_user_file

VARIABLE = "live-variable"
"""The rule of memory that a variable keeps."""

_LEAST_IN_A_CALL: Final = 0.25
"""The share of the tensors from which a variable of a call in progress, made in the same step, is a
cause without a trial: functions keep their variables until they return, and programs that need all
their memory have variables of a fifth."""


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
        return Answer(
            "cached-results",
            f"{size} from {main.made_at} are {used} and kept by {holder.place}",
            "limit the cache (maxsize), or do not cache tensors: a cache of a method keeps its "
            "object, too",
            code="@functools.lru_cache(maxsize=1)",
        )
    if holder.container is not None or len(holder.path) > 1:
        return Answer(
            "kept-tensors",
            f"{size} from {main.made_at} are {used} and kept by {kept_in(holder)}",
            "drop what is not needed any more, or keep copies on the CPU (.detach().cpu())",
            code=".detach().cpu()",
            edit=EditKind.TO_CPU,
        )
    if not holder.path or (main.phase == "backward" and not main.earlier):
        return None  # the backward pass that runs has just used it
    name = holder.path[0].label
    last = "" if main.last_use is None else f", last used at {main.last_use}"
    return Answer(
        VARIABLE,
        f"{size} from {main.made_at} are {used}{last}: the variable {_variable(holder, name)} "
        "keeps them",
        f"delete it after its last use: del {name}",
        code=f"del {name}",
        edit=EditKind.DELETE,
    )


def is_usual(group: HeldGroup, answer: Answer) -> bool:
    """Whether it is a variable as most functions have some: its deletion has to be tried."""
    made_now = not group.main.earlier and group.holder is not None and bool(group.holder.function)
    return answer.rule == VARIABLE and made_now and group.share < _LEAST_IN_A_CALL


def _variable(holder: Holder, name: str) -> str:
    return f"{name} in {holder.function}" if holder.function else name
