"""Words that several rules use."""

from __future__ import annotations

from collections.abc import Collection
from itertools import takewhile
from typing import Final

from gpuprobe.causes.live_memory import LiveMemory
from gpuprobe.model.memory import Category
from gpuprobe.model.run.holders import Holder, HolderRoot, Kept, with_article

_MOST_NAMES: Final = 3


def kept_in(holder: Holder) -> str:
    """The container in which a holder has several such tensors, or the holder itself:
    ``history['val'] (a list of 41)``.
    """
    labels = []
    for step in holder.path:
        labels.append(step.label)
        if (step.holding or 0) > 1:
            size = "" if step.size is None else f" of {step.size:,}"
            where = f" in {holder.function}" if holder.function else ""
            where += f"; also {holder.also}" if holder.also else ""
            return f"{''.join(labels)} ({with_article(step.kind)}{size}{where})"
    return holder.place


def of_names(live: LiveMemory, rows: Collection[int], word: str = " of ") -> str:
    """`` of k, v (in attend)``: the names that hold rows, the largest first; the variable that the
    largest is computed for, if none holds it; "" if that is unknown, too.
    """
    sizes: dict[tuple[str, str, str], int] = {}
    for row in rows:
        holder = live.holders.get(row)
        if holder is not None and holder.name and holder.root is not HolderRoot.OUTSIDE:
            key = holder.name, holder.function, kept_in(holder)
            sizes[key] = sizes.get(key, 0) + live.size[row]
    found = sorted(sizes, key=lambda key: -sizes[key])[:_MOST_NAMES]
    whole = list(dict.fromkeys(place for _, _, place in found))
    if len(whole) == 1:
        return f"{word}{whole[0]}"
    if whole:
        functions = {function for _, function, _ in found}
        where = f" (in {functions.pop()})" if len(functions) == 1 and all(functions) else ""
        return f"{word}{', '.join(dict.fromkeys(name for name, _, _ in found))}{where}"
    largest = max(rows, key=lambda row: live.size[row], default=None)
    return "" if largest is None else for_variable(live, largest)


def for_variable(live: LiveMemory, row: int) -> str:
    """`` computed for the variable messages``, which may be smaller; "" if it is unknown."""
    name = live.variable(live.frames(row))
    return f" computed for the variable {name}" if name else ""


def saved_by(live: LiveMemory, rows: Collection[int]) -> str:
    """That the autograd graph keeps most of rows, if it does."""
    kept = 2 * live.bytes_of(filter(live.for_backward, rows)) > live.bytes_of(rows)
    return "; the autograd graph keeps it for the backward pass" if kept else ""


def parameters_like(live: LiveMemory, gradients: Collection[int]) -> list[int]:
    """The parameters of the sizes of gradients."""
    sizes = {live.ledger.requested[row] for row in gradients}
    return [
        row
        for row in live.rows
        if live.category(row) is Category.PARAMETER and live.ledger.requested[row] in sizes
    ]


def of_owner(live: LiveMemory, gradients: Collection[int]) -> str:
    """`` of model.encoder``: what `owners_of` names; "" if it names nothing."""
    owners = owners_of(live, gradients)
    return f" of {' and '.join(owners)}" if owners else ""


def owners_of(live: LiveMemory, gradients: Collection[int]) -> list[str]:
    """``model.encoder``: the parts of a module, by names of the program, that have all these
    gradients; or the only name whose parameters have their sizes; none if they are unknown.
    """
    parts = _parts_of({live.text("module", row) for row in gradients})
    names = [_name_of(live, gradients, part) for part in parts]
    if names and all(names):
        return names
    sizes = {live.ledger.requested[row] for row in gradients}
    known: dict[str, set[int]] = {}
    for row in parameters_like(live, gradients):
        holder = live.holders.get(row)
        if holder is not None and holder.path and holder.kept is Kept.TENSOR:
            known.setdefault(holder.path[0].label, set()).add(live.ledger.requested[row])
    return list(known) if len(known) == 1 and sizes in known.values() else []


def share_a_part(live: LiveMemory, gradients: Collection[int]) -> bool:
    """Whether the part of a module that has these gradients has others that an optimizer reads, as
    where adapters of a model are trained.
    """
    modules = {live.text("module", row) for row in gradients}
    parts = _parts_of(modules) or {module.partition(".")[0] for module in modules}
    return any(
        _is_in(live.text("module", row), part)
        for row in range(len(live.ledger))
        if row not in gradients
        and live.text("last_phase", row).startswith("optimizer")
        and live.category(row) is Category.GRADIENT
        for part in parts
    )


def _is_in(module: str, part: str) -> bool:
    return f"{module}.".startswith(f"{part}.")


def _parts_of(modules: Collection[str]) -> list[str]:
    """``Classifier.encoder`` of ``Classifier.encoder.stem`` and others: the part of a module that
    they all are in, or the few parts of a whole model.
    """
    levels = [module.split(".") for module in modules]
    common = len(list(takewhile(lambda names: len(set(names)) == 1, zip(*levels, strict=False))))
    if not common:
        return []
    if common > 1:
        return [".".join(levels[0][:common])]
    parts = sorted({".".join(names[:2]) for names in levels})
    return parts if len(parts) <= _MOST_NAMES and all("." in part for part in parts) else []


def _name_of(live: LiveMemory, gradients: Collection[int], part: str) -> str:
    """The name of a part of a module by the program's name of one of its parameters; "" if none is
    known.
    """
    inner = part[part.index(".") :] if "." in part else ""
    for row in parameters_like(live, gradients) if inner else ():
        holder = live.holders.get(row)
        name = "" if holder is None or holder.kept is not Kept.TENSOR else holder.name
        at = f"{name}.".find(f"{inner}.")
        if at > 0:
            return f"{name[:at]}{inner}"
    return ""
