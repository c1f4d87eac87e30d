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
        return f"{word}{', '.join(name for name, _, _ in found)}{where}"
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
    """`` of model.encoder``: the part of a module, by a name of the program, that has all these
    gradients; the only name whose parameters have their sizes; "" if neither is known.
    """
    part = _part_of(live, gradients)
    if part:
        return f" of {part}"
    sizes = {live.ledger.requested[row] for row in gradients}
    names: dict[str, set[int]] = {}
    for row in parameters_like(live, gradients):
        holder = live.holders.get(row)
        if holder is not None and holder.path and holder.kept is Kept.TENSOR:
            names.setdefault(holder.path[0].label, set()).add(live.ledger.requested[row])
    return f" of {next(iter(names))}" if len(names) == 1 and sizes in names.values() else ""


def _part_of(live: LiveMemory, gradients: Collection[int]) -> str:
    """``model.encoder`` for gradients in ``Classifier.encoder.stem`` and its other parts; "" for
    those of a whole model, or of several.
    """
    modules = {live.text("module", row) for row in gradients}
    levels = zip(*(module.split(".") for module in modules), strict=False)
    parts = [names[0] for names in takewhile(lambda names: len(set(names)) == 1, levels)]
    inner = "".join(f".{name}" for name in parts[1:])
    for row in parameters_like(live, gradients) if inner else ():
        holder = live.holders.get(row)
        name = "" if holder is None or holder.kept is not Kept.TENSOR else holder.name
        at = f"{name}.".find(f"{inner}.")
        if at > 0:
            return f"{name[:at]}{inner}"
    return ""
