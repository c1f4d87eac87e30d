"""Memory that is allocated long before its first use: a data set, or a queue that runs ahead."""

from __future__ import annotations

from itertools import pairwise

from gpuprobe.causes.answer import EXPECTED, Answer, EditKind, Expected
from gpuprobe.causes.groups import HeldBlock, HeldGroup
from gpuprobe.causes.wording import kept_in
from gpuprobe.model.memory import Category
from gpuprobe.model.needs import Need
from gpuprobe.model.text import human_bytes

_EXPECTED = (
    Category.PARAMETER,
    Category.GRADIENT,
    Category.GRADIENT_BUCKET,
    Category.OPTIMIZER_STATE,
    Category.BUFFER,
    Category.WORKSPACE,
)
"""Categories that wait for their use in every step."""


_OF_A_MODEL = (Category.PARAMETER, Category.BUFFER)
_WHOLE = 0.9
"""The share of a group from which it is a model that waits: others have the same name before it."""
_LEAST_QUEUED = 4
_APART = 2
"""From the first use of one batch of a queue to that of the next, in operators, at least."""
_COPIES = ("_to_copy", "copy_", "_pin_memory", "empty", "empty_strided", "")
"""What makes a batch on the GPU of one on the host; the trace may not have it."""
_OTHER_USES = ("_to_copy", "clone", "copy_", "replay of a CUDA graph")
"""Uses by which a tensor is no waiting batch: a conversion, and by a graph whose memory it is."""


def diagnose(group: HeldGroup) -> Answer | Expected | None:
    """Blocks of which no operator of this step has used one, nor uses one before a later step."""
    if any(block.need is not Need.NOT_YET for block in group.blocks):
        return None
    later = [b for b in group.blocks if b.last_use is None]
    waiting = [b for b in later if b.category not in _EXPECTED]
    model = [b for b in later if b.category in _OF_A_MODEL]
    if not waiting and sum(b.bytes for b in model) >= _WHOLE * group.bytes:
        waiting = model  # a whole model, of which this step uses nothing
    waiting = waiting or _one_after_the_other(group)
    held = sum(block.bytes for block in waiting)
    if 2 * held <= group.bytes:
        return EXPECTED
    many = len(waiting)
    what = f"{many} tensors" if many > 1 else "a tensor"
    holder = "" if group.holder is None else f" in {kept_in(group.holder)}"
    if waiting[0].made_by not in _COPIES and waiting[0].category not in _OF_A_MODEL:
        return Answer(
            "too-early",
            f"{human_bytes(held)} in {what}{holder} from {group.main.made_at} are results that "
            "wait on the GPU until all of them are there",
            "keep what is read of each, such as an argmax or a sum; or keep copies on the CPU "
            "(.detach().cpu()), and move each to the GPU when it is used",
            code=".detach().cpu()",
            edit=EditKind.TO_CPU,
        )
    return Answer(
        "too-early",
        f"{human_bytes(held)} in {what}{holder} from {group.main.made_at} wait on the GPU for "
        "their turn",
        "keep them on the CPU, and move each to the GPU in the step that uses it (with pinned "
        "memory and non_blocking=True, if the copies take time)",
    )


def _one_after_the_other(group: HeldGroup) -> list[HeldBlock]:
    """The blocks, if one line made all of them and they are used one after the other."""
    if len({block.made_at for block in group.blocks}) > 1:
        return []
    uses = sorted(block.uses for block in group.blocks)
    apart = all(
        last < first and first - before >= _APART for (before, last), (first, _) in pairwise(uses)
    )
    expected = any(block.category in _EXPECTED or block.by in _OTHER_USES for block in group.blocks)
    return list(group.blocks) if apart and not expected and len(uses) >= _LEAST_QUEUED else []
