"""Tensors that a variable, an attribute or a container of the program keeps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Final

from gpuprobe.causes.answer import Answer, EditKind
from gpuprobe.causes.groups import HeldBlock, HeldGroup
from gpuprobe.causes.lines import reading_line
from gpuprobe.causes.wording import kept_in
from gpuprobe.model.place import Place
from gpuprobe.model.run.holders import Holder, HolderRoot, Kept
from gpuprobe.model.text import human_bytes
from gpuprobe.remedies.edits import LimitEntries, ReleasePart
from gpuprobe.remedies.flow import reads
from gpuprobe.remedies.text import ProgramText
from gpuprobe.user_frames import is_user_file

KEPT_TENSORS = "kept-tensors"
LIVE_VARIABLE = "live-variable"
LEAST_OF_A_STEP: Final = 0.2
"""The share of the tensors from which a variable of the same step is a cause: a loop or function
keeps its variables until it ends, and programs that need all their memory have some of a sixth."""
BY_KEY: Final = frozenset(("dict", "defaultdict", "OrderedDict"))
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
    used = _used(group)
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
            KEPT_TENSORS,
            _kept_sentence(group, holder),
            ("limit its entries" if _by_key(holder) else "drop what is not needed any more")
            + ", or keep copies on the CPU (.detach().cpu()"
            + (" of each tensor)" if _in_parts(holder) else ")")
            + ", if nothing on the GPU reads them later",
            code="" if _in_parts(holder) or _by_key(holder) else ".detach().cpu()",
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


def kept_to_be_read(group: HeldGroup, text: ProgramText) -> Answer | None:
    """The answer for results that the program, by the file ``text``, stores to read them again:
    copies on the CPU would not do, or it would have to move each of them back.
    """
    holder = group.holder
    many = None if holder is None else holder.container
    if holder is None or many is None or holder.root is HolderRoot.CACHE:
        return None
    labels = [step.label for step in holder.path[: holder.path.index(many) + 1]]
    depth = next((at for at, one in enumerate(reversed(labels)) if one[:1] != "["), 0)
    line = reading_line(text, labels[-1 - depth].removeprefix("."), depth)
    if not line:
        return None
    limit = limited_entries(group)
    fewer = "drop the entries that are not needed any more"
    if limit is not None:
        fewer = (
            f"limit the entries, such as to {limit.most}, where what is dropped can be computed "
            "again"
        )
    return Answer(
        KEPT_TENSORS,
        _kept_sentence(group, holder),
        f"{fewer}. Copies on the CPU (.detach().cpu()) are no fix alone: line {line} reads entries,"
        " and would have to move each back to the GPU. Not tried: a narrower type (.half()), which "
        "halves float32",
        code="" if limit is None else ": ".join(limit.rows),
        edit=EditKind.LIMIT_ENTRIES,
    )


def is_argument(group: HeldGroup, text: ProgramText) -> bool:
    """Whether a variable cannot be deleted after its last use: the statement that its function runs
    in the file ``text`` reads it, and called the function that used it last.
    """
    holder = group.holder
    if holder is None or holder.root is not HolderRoot.LOCAL or holder.file != text.name:
        return False
    used, name = group.main.last_use, holder.path[0].label
    if isinstance(used, Place) and (used.file, used.line) == (holder.file, holder.line):
        return False
    return any(reads(statement, name) for statement in text.statements(holder.line))


def without_copies(answer: Answer) -> Answer:
    """The answer if the program fails with copies on the CPU."""
    if answer.edit is not EditKind.TO_CPU:
        return answer
    remedy = "drop what is not needed any more; with copies on the CPU alone the program fails"
    return replace(answer, remedy=remedy, code="")


def limited_entries(group: HeldGroup, line: int = 0) -> LimitEntries | None:
    """The edit that leaves a dictionary as many of its entries as are in use at the peak, at the
    line that stores one; None if the group has something else, or entries of several tensors.
    """
    holder = group.holder
    many = None if holder is None else holder.container
    if holder is None or many is None or many.size is None or _in_parts(holder):
        return None
    if many.kind not in BY_KEY or not all(block.need.needless for block in group.blocks):
        return None
    labels = (step.label for step in holder.path[: holder.path.index(many) + 1])
    return LimitEntries(line, "".join(labels), max(1, many.size - len(group.blocks)))


def late_variable(blocks: Iterable[HeldBlock], holders: Mapping[int, Holder]) -> str:
    """The variable that keeps the most of what is not used again, with the bytes; "" if none is
    known.
    """
    kept: Counter[tuple[str, str, int]] = Counter()  # several functions may have one name
    for block in blocks:
        holder = holders.get(block.row)
        if holder is None or not block.need.needless or not holder.path:
            continue
        local = holder.root is HolderRoot.LOCAL and is_user_file(holder.file)
        if (local or holder.root is HolderRoot.GLOBAL) and holder.kept is Kept.TENSOR:
            name = _variable(holder, holder.path[0].label)
            kept[name, holder.file, holder.line] += block.bytes
    for (name, _, _), size in kept.most_common(1):
        return f"{human_bytes(size)} of them kept by the variable {name}"
    return ""


def _is_of_an_object(holder: Holder) -> bool:
    """Whether a path goes from a cache through the first argument of a call to its attributes."""
    labels = [step.label for step in holder.path[1:3]]
    return len(labels) == 2 and labels[0] == "[0]" and labels[1].startswith(".")


def _by_key(holder: Holder) -> bool:
    return holder.container is not None and holder.container.kind in BY_KEY


def _in_parts(holder: Holder) -> bool:
    """Whether the elements of the container are containers of tensors, too."""
    return (
        holder.container is not None and holder.path.index(holder.container) < len(holder.path) - 2
    )


def _used(group: HeldGroup) -> str:
    return "never used" if group.never_used else "not used again"


def _kept_sentence(group: HeldGroup, holder: Holder) -> str:
    return (
        f"{human_bytes(group.bytes)} from {group.main.made_at} are {_used(group)} and kept by "
        f"{_kept_by(group, holder)}"
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
